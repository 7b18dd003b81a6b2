"""Timings of graphs in the database: merged, exported, and added to files of earlier builds."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from support.database_rows import FULL, HERE, PROBLEM, change, fill, rows_of

from mucudnn.core.errors import DatabaseError, InvalidInputError
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines, read_profile

SECONDS = [[0.1, 1 / 3], [5e-324]]


def earlier(path: Path) -> Path:
    """Make a file of a build that had no timings."""
    change(fill(path), "DROP TABLE timings")
    return path


def test_a_file_of_an_earlier_build_gets_timings(tmp_path: Path) -> None:
    path = earlier(tmp_path / "earlier.sqlite")
    kept = shutil.copy(path, tmp_path / "kept.sqlite")
    with Database(path, read_only=True) as database:
        assert database.timing(HERE, "a call") is None
        assert database.info()[0].timings == 0
        assert len(database.every_row()) == 3
        with database.copy_in_memory() as copy:
            copy.add_timing(HERE, "a call", SECONDS, None)
            assert copy.timing(HERE, "a call") == (SECONDS, None)
    assert path.read_bytes() == kept.read_bytes()
    with Database(path) as first, Database(path) as second:
        first.add_timing(HERE, "a call", SECONDS, 0.25)
        assert second.timing(HERE, "a call") == (SECONDS, 0.25)
        assert second.timing(HERE, "another") is None
    assert rows_of(path, HERE, PROBLEM) == FULL
    with Database(tmp_path / "new.sqlite") as new:
        assert new.merge(kept).added == 3


def test_exports_and_merges_carry_timings(tmp_path: Path) -> None:
    stream, profile = io.StringIO(), tmp_path / "rows.jsonl"
    with Database(tmp_path / "full.sqlite") as database:
        database.add_timing(HERE, "a call", SECONDS, 0.25)
        export_json_lines(database, stream)
        profile.write_text(stream.getvalue())
        with read_profile(profile) as read, Database(":memory:") as merged:
            assert merged.merge(read) == (1, 0)
            assert merged.merge(database) == (0, 1)
            assert merged.timing(HERE, "a call") == (SECONDS, 0.25)
            assert merged.info() == database.info()
    bad = tmp_path / "bad.jsonl"
    for wrong in ("[]", "[[]]", "[[-1.0]]", "[[NaN]]", '[[\\"1\\"]]', "[1.0]", "{}", "["):
        bad.write_text(stream.getvalue().replace(str(SECONDS), wrong))
        with pytest.raises(DatabaseError, match=r"line 1: .*seconds"):
            read_profile(bad)


def test_what_is_no_timing_is_refused() -> None:
    with Database(":memory:") as database:
        for subject, seconds, load in (("", SECONDS, None), ("a", [[-1.0]], None), ("a", SECONDS, 2.0)):
            with pytest.raises(InvalidInputError, match="must be"):
                database.add_timing(HERE, subject, seconds, load)
        assert database.every_row() == []
