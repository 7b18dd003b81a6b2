"""What must not be loaded before it is needed; asked of a fresh process."""

import pytest
from support.processes import loaded_by

import mucudnn


def test_import_loads_nothing_heavy() -> None:
    assert loaded_by("import mucudnn; mucudnn.Config(); mucudnn.Operation.FORWARD; mucudnn.InfeasibleError") == set()


def test_the_test_above_can_fail() -> None:
    assert {"torch", "mucudnn.modules.conv2d"} <= loaded_by("import mucudnn; mucudnn.Conv2d")


@pytest.mark.parametrize("name", mucudnn.__all__)
def test_every_export_is_there(name: str) -> None:
    assert getattr(mucudnn, name).__name__ == name
    assert name in dir(mucudnn)


def test_unknown_attribute_says_so() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conv3d'"):
        _ = mucudnn.conv3d
