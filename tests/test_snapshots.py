"""Stored tables and prose: each belongs to a test, and none is written by ``make test``."""

from __future__ import annotations

import pytest
from support.places import SNAPSHOTS, TESTS
from support.snapshots import IS_WRITING, assert_as_stored


def test_every_stored_text_is_compared_somewhere() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    unused = [path.name for path in SNAPSHOTS.iterdir() if f'assert_as_stored("{path.stem}"' not in tests]
    assert not unused


@pytest.mark.skipif(IS_WRITING, reason="texts are written, not compared")
def test_a_difference_is_told() -> None:
    with pytest.raises(AssertionError, match=r"layers\.txt says otherwise[\s\S]*something else"):
        assert_as_stored("layers", "something else")
