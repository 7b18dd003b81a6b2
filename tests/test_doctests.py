"""Every worked example in a docstring gives what it says. Examples measure nothing and need no network."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest

import mucudnn


def modules_with_examples() -> Iterator[str]:
    """Names of the modules whose text has an example, found without importing them: most have none."""
    for module in walk_packages(mucudnn.__path__, "mucudnn."):
        spec = module.module_finder.find_spec(module.name, None)
        assert spec is not None
        assert spec.origin is not None
        if spec.origin.endswith(".py") and ">>> " in Path(spec.origin).read_text(encoding="utf-8"):
            yield module.name


@pytest.mark.parametrize("name", [*modules_with_examples()])
def test_examples_give_what_they_say(name: str) -> None:
    found = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS)
    assert found.attempted, "the example is in no docstring"
    assert found.failed == 0


def test_the_test_above_can_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """A module whose example is wrong."""
    wrong = type(doctest)("wrong", ">>> 1 + 1\n3")
    assert doctest.testmod(wrong).failed == 1
    assert "Expected" in capsys.readouterr().out
