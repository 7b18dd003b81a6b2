"""Algorithms of other packages: what is refused, how they are found, and what happens where they are missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.plug_in import Doubling, Pointwise

import mucudnn
from mucudnn.core.errors import InvalidInputError
from mucudnn.kernels import registry
from mucudnn.kernels.registry import algorithm, algorithms, installed_plug_ins, register


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    installed_plug_ins.cache_clear()
    yield
    installed_plug_ins.cache_clear()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, code: str) -> None:
    """Put a package with one entry point on the path, as pip would."""
    (folder / f"{module}.py").write_text(code)
    information = folder / f"{module}-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
    (information / "entry_points.txt").write_text(f"[{registry.GROUP}]\nanything = {module}:BROUGHT\n")
    monkeypatch.syspath_prepend(folder)


def test_what_is_registered_is_one_of_the_algorithms_the_last() -> None:
    mine = Pointwise()
    mucudnn.register(mine)
    assert algorithms()[-1] is mine
    assert algorithms()[0].name == "native"
    assert mine not in algorithms("cuda")
    assert algorithm("test/pointwise") is mine


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Pointwise, "algorithm is the class Pointwise; give an instance of a class that inherits from mucudnn.BaseAlg"),
        ("gemm", "algorithm is 'gemm'; give an instance of a class"),
        (SimpleNamespace(name="a/b", version=1), "give an instance of a class that inherits from mucudnn.BaseAlg"),
        (type("Bare", (mucudnn.BaseAlgorithm,), {"name": "a/b"})(), "which lacks version, supports, step: define them"),
        (Pointwise(name="pointwise"), "'pointwise'; write 'package/name'"),
        (Pointwise(name="test:pointwise"), "'test:pointwise'; write 'package/name'"),
        (Pointwise(name="a/b c"), "'a/b c'; write 'package/name'"),
        (Pointwise(name="a/b/c"), "write 'package/name'"),
        (Pointwise(name=7), "name of an algorithm is 7; it must be text"),  # type: ignore[arg-type]
        (Pointwise(version=0), "version of test/pointwise is 0; it must be at least 1"),
        (Pointwise(version=True), "version of test/pointwise is True; it must be a whole number"),
        (Pointwise(version="1"), "version of test/pointwise is '1'"),  # type: ignore[arg-type]
        (Pointwise(deterministic="yes"), "deterministic of test/pointwise is 'yes'"),  # type: ignore[arg-type]
        (Pointwise(device_type="abacus"), "device_type of test/pointwise is 'abacus'; allowed are cpu, cuda"),
    ],
)
def test_what_is_no_algorithm_is_refused_in_words(value: Any, expected: str) -> None:
    with pytest.raises(InvalidInputError, match=expected):
        register(value)
    assert len(algorithms()) == len(registry._CPU)


@pytest.mark.parametrize("brought", ["Pointwise()", "(Pointwise(), Doubling())", "[Pointwise()]"])
def test_an_installed_package_brings_one_or_several(
    brought: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"from support.plug_in import Doubling, Pointwise\nBROUGHT = {brought}\n"
    install(tmp_path, monkeypatch, f"brings_{len(brought)}", code)
    assert Pointwise() in algorithms()
    assert (Doubling() in algorithms()) == ("Doubling" in brought)
    (plug_in,) = installed_plug_ins()
    assert plug_in.algorithms[0] == "test/pointwise"
    assert plug_in.package.endswith(" 1.2")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ValueError('no such thing')", "ValueError: no such thing"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("BROUGHT = 7", "InvalidInputError: algorithm is 7; give an instance"),
        ("", "AttributeError: .*BROUGHT"),
    ],
)
def test_a_broken_package_is_named_in_a_warning_and_passed_over(
    code: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"broken_{abs(hash(code))}"
    install(tmp_path, monkeypatch, module, code)
    with pytest.warns(RuntimeWarning, match=rf"the algorithms of {module} 1.2 are skipped: .* raised {expected}"):
        names = [a.name for a in algorithms()]
    assert "native" in names
    assert algorithms()  # without another warning
    assert module in installed_plug_ins()[0].package
    assert installed_plug_ins()[0].error


def test_torchs_own_runs_where_the_package_is_missing_and_it_is_said_once() -> None:
    layer = torch.nn.Conv2d(4, 6, 1)
    x = torch.randn(2, 4, 5, 5)
    register(Pointwise())
    tuned = tuned_layer(layer)
    expected = tuned(x)
    registry._registered.clear()
    tuned.choices.executables.clear()
    with pytest.warns(RuntimeWarning, match="'test/pointwise' is of a package that is not installed.*torch's own"):
        actual = tuned(x)
    tuned.choices.executables.clear()
    tuned(x)  # in silence: any warning is an error here
    torch.testing.assert_close(actual, layer(x))
    torch.testing.assert_close(actual, expected)


def tuned_layer(layer: torch.nn.Conv2d) -> Any:
    """The layer, which on two samples runs ``test/pointwise`` forward."""
    from mucudnn.running.choices import Choices

    problem = mucudnn.ConvProblem(mucudnn.Operation.FORWARD, 4, 5, 5, 6, 1, 1)
    configuration = mucudnn.Configuration((mucudnn.MicroConfig("test/pointwise", 2),), 1.0, 0)
    tuned = mucudnn.Conv2d(4, 6, 1)
    tuned.load_state_dict(layer.state_dict())
    tuned.choices = Choices.of({problem: {2: configuration}})
    return tuned
