"""Timings of graphs, and volumes, in the database: merged, exported, and added to files of an earlier version."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.database_rows import FAST, FULL, HERE, PROBLEM, VERSIONS, fill, of_version_9, rows_of

from mucudnn.core.errors import DatabaseError, InvalidInputError
from mucudnn.store import schema
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines, read_profile

VOLUME = replace(PROBLEM, d=8, t=3, stride=(1, 1, 1), padding=(1, 2, 2), dilation=(1, 1, 1))
SECONDS = [[0.1, 1 / 3], [5e-324]]


def test_a_file_of_version_9_is_converted_and_gets_timings(tmp_path: Path) -> None:
    path = of_version_9(tmp_path / "earlier.sqlite")
    kept = shutil.copy(path, tmp_path / "kept.sqlite")
    with Database(path, read_only=True) as database:
        assert database.timing(HERE, "a call") is None
        assert database.info()[0].timings == 0
        assert len(database.every_row()) == 3
        with database.copy_in_memory() as copy:
            copy.add(HERE, VOLUME, 1, FAST)
            copy.add_timing(HERE, "a call", SECONDS, None)
            assert copy.timing(HERE, "a call") == (SECONDS, None)
    assert path.read_bytes() == kept.read_bytes()
    with Database(path) as first, Database(path) as second:
        first.add_timing(HERE, "a call", SECONDS, 0.25)
        first.add(HERE, VOLUME, 1, replace(FAST, step_s=7.0))
        assert second.problems(HERE) == {PROBLEM, VOLUME}
        assert second.timing(HERE, "a call") == (SECONDS, 0.25)
        assert second.timing(HERE, "another") is None
    assert rows_of(path, HERE, PROBLEM) == FULL
    with Database(tmp_path / "new.sqlite") as new:
        assert new.merge(Path(kept)).added == 3


def test_volumes_are_other_problems_than_images(tmp_path: Path) -> None:
    """Every size tells them apart; exports of version 9, without columns of volumes, are of images."""
    path = fill(tmp_path / "volumes.sqlite")
    others = [
        replace(VOLUME, d=9),
        replace(VOLUME, t=2),
        *(replace(VOLUME, **{name: (2, *getattr(VOLUME, name)[1:])}) for name in ("stride", "padding", "dilation")),
    ]
    slow = [replace(FAST, step_s=float(index + 2)) for index in range(len(others))]
    with Database(path) as database:
        for problem, measured in zip(others, slow, strict=True):
            database.add(HERE, problem, 1, measured)
        for problem, measured in zip(others, slow, strict=True):
            assert database.measurements(HERE, problem, VERSIONS) == (measured,)
        assert database.problems(HERE) == {PROBLEM, *others}
        export_json_lines(database, stream := io.StringIO())
    rows = [json.loads(line) for line in stream.getvalue().splitlines()]
    (tmp_path / "rows.jsonl").write_text("".join(map(as_of_version_9, rows)))
    with read_profile(tmp_path / "rows.jsonl") as read:
        assert read.problems(HERE) == {PROBLEM}


def as_of_version_9(row: dict[str, object]) -> str:
    """Return a row as a line of version 9, which knew no volumes."""
    if row["d"]:
        return ""
    return json.dumps({name: one for name, one in row.items() if name not in schema.OF_VOLUMES} | {"schema": 9}) + "\n"


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
