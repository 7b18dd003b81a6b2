"""What must not be loaded before it is needed; asked of a fresh process."""

import subprocess
import sys

import pytest

import mucudnn

HEAVY = ("torch", "cupy", "pulp", "pandas", "rich", "mucudnn.nn")


def loaded_by(code: str) -> set[str]:
    """The heavy modules that a new process has loaded after ``code``."""
    probe = f"import sys\n{code}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", probe], check=True, capture_output=True, text=True).stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import mucudnn; mucudnn.Config(); mucudnn.Operation.FORWARD; mucudnn.InfeasibleError") == set()


def test_the_test_above_can_fail() -> None:
    assert {"torch", "mucudnn.nn"} <= loaded_by("import mucudnn; mucudnn.Conv2d")


@pytest.mark.parametrize("name", mucudnn.__all__)
def test_every_export_is_there(name: str) -> None:
    assert getattr(mucudnn, name).__name__ == name
    assert name in dir(mucudnn)


def test_unknown_attribute_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conv3d'"):
        _ = mucudnn.conv3d
