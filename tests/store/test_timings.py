"""Timings of graphs, and volumes, in the database: merged and exported."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from support.database_rows import FAST, HERE, PROBLEM, VERSIONS, fill

from mucudnn.core.errors import DatabaseError, InvalidInputError
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines, read_profile

VOLUME = replace(PROBLEM, d=8, t=3, stride=(1, 1, 1), padding=(1, 2, 2), dilation=(1, 1, 1))
SECONDS = [[0.1, 1 / 3], [5e-324]]


def test_volumes_are_other_problems_than_images(tmp_path: Path) -> None:
    """Every size tells them apart, in exports too."""
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
    (tmp_path / "rows.jsonl").write_text(stream.getvalue())
    with read_profile(tmp_path / "rows.jsonl") as read:
        assert read.problems(HERE) == {PROBLEM, *others}


def test_exports_and_merges_carry_timings(tmp_path: Path) -> None:
    stream, profile = io.StringIO(), tmp_path / "rows.jsonl"
    with Database(tmp_path / "full.sqlite") as database:
        database.add_timing(HERE, "a call", SECONDS, 0.25)
        export_json_lines(database, stream)
        profile.write_text(stream.getvalue())
        with read_profile(profile) as read, Database(":memory:") as merged:
            assert merged.merge(read) == {"added": 1, "known": 0}
            assert merged.merge(database) == {"added": 0, "known": 1}
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
