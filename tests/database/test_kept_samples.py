"""Samples in the database: exact, wherever a row goes."""

from __future__ import annotations

import csv
import io
import json
from contextlib import closing
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.database_rows import FAST, HERE, PAIRS, PROBLEM, SAMPLES, VERSIONS, fill

from mucudnn.database.copying import CopyingDatabase
from mucudnn.database.database import Database
from mucudnn.database.exports import export_csv, export_json_lines, open_stored
from mucudnn.database.samples import packed, unpacked
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import MicroConfig

SECONDS = st.lists(st.floats(min_value=0, allow_infinity=False), min_size=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fill(tmp_path / "full.sqlite")


def readable(value: object) -> object:
    return unpacked(value) if isinstance(value, bytes) else value


def kept_in(database: Database) -> list[dict[str, Any]]:
    """What rows have of samples and processors, by kind."""
    names = ("setup_samples_s", "step_samples_s", "baseline_samples_s", "time_samples_s", "stolen", "clock_hz")
    return [{"kind": row["kind"]} | {name: readable(row[name]) for name in names} for row in database.every_row()]


NOTHING = dict.fromkeys(("setup_samples_s", "step_samples_s", "baseline_samples_s", "time_samples_s"))
KEPT = [
    {
        **{"kind": "measurement", **NOTHING, "stolen": 0.25, "clock_hz": 2.4e9},
        **{"setup_samples_s": [*SAMPLES.setup_samples_s], "step_samples_s": [*SAMPLES.step_samples_s]},
    },
    {"kind": "failure", **NOTHING, "stolen": None, "clock_hz": None},
    {
        **{"kind": "verification", **NOTHING, "stolen": 0.0, "clock_hz": 2.4e9},
        **{"baseline_samples_s": [*PAIRS.baseline_samples_s], "time_samples_s": [*PAIRS.time_samples_s]},
    },
]


@given(SECONDS)
def test_samples_come_back_to_the_last_bit(samples: list[float]) -> None:
    assert unpacked(packed("samples", samples)) == samples
    assert len(packed("samples", samples)) == 8 * len(samples)


@given(SECONDS, st.sampled_from([nan, inf, -inf, -1e-300, None, "1", 10**400]), st.data())
def test_a_sample_that_cannot_be_is_found_wherever_it_stands(
    samples: list[float], bad: float, data: st.DataObject
) -> None:
    samples.insert(data.draw(st.integers(0, len(samples))), bad)
    with pytest.raises(InvalidInputError, match="it must be seconds, each finite and at least 0"):
        packed("samples", samples)


def test_samples_are_kept_with_their_row(path: Path) -> None:
    with Database(path, read_only=True) as database:
        assert kept_in(database) == KEPT


def test_they_are_readable_in_exports(path: Path) -> None:
    lines, table = io.StringIO(), io.StringIO(newline="")
    with Database(path, read_only=True) as database:
        export_json_lines(database, lines)
        export_csv(database, table)
    measurement, failure, verification = map(json.loads, lines.getvalue().splitlines())
    assert measurement["step_samples_s"] == [*SAMPLES.step_samples_s]
    assert (measurement["stolen"], measurement["clock_hz"]) == (0.25, 2.4e9)
    assert verification["time_samples_s"] == [*PAIRS.time_samples_s]
    assert not {"step_samples_s", "stolen", "clock_hz"} & failure.keys()
    first, *_ = csv.DictReader(io.StringIO(table.getvalue(), newline=""))
    assert json.loads(first["step_samples_s"]) == [*SAMPLES.step_samples_s]


@pytest.mark.parametrize("kind", ["sqlite", "csv", "jsonl"])
def test_merging_brings_them(path: Path, tmp_path: Path, kind: str) -> None:
    source = path
    if kind != "sqlite":
        source = tmp_path / f"rows.{kind}"
        with Database(path) as database, source.open("w", newline="") as stream:
            (export_csv if kind == "csv" else export_json_lines)(database, stream)
    with Database(tmp_path / "other.sqlite") as other, open_stored(source) as read:
        other.merge(read)
        assert kept_in(other) == KEPT


def test_ranks_pass_them_along(path: Path, tmp_path: Path) -> None:
    """What one rank measured, another one has in memory and in its file."""
    added = replace(FAST, micro_config=MicroConfig("gemm", 2))
    with Database(path) as own_file, Database(tmp_path / "other.sqlite") as other_file:
        with closing(CopyingDatabase(own_file)) as own, closing(CopyingDatabase(other_file)) as other:
            own.add(HERE, PROBLEM, 1, added)
            other.take(own.fresh_rows(), copies=True)
            assert kept_in(own) == [*KEPT, KEPT[0]]
            assert kept_in(other) == [KEPT[0]]
        assert kept_in(other_file) == [KEPT[0]]


def test_a_file_that_is_replaced_gets_them(path: Path) -> None:
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, FAST)
        path.unlink()
        with pytest.warns(UserWarning, match="was deleted while it was in use"):
            database.add(HERE, PROBLEM, 1, replace(FAST, micro_config=MicroConfig("gemm", 2)))
    with Database(path) as database:
        assert kept_in(database) == [KEPT[0], KEPT[0]]


def test_pruning_leaves_those_that_count(path: Path) -> None:
    newer = replace(SAMPLES, step_samples_s=(1e-3,))
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, replace(FAST, raw=newer))
        assert database.prune() == 1
        steps = [kept["step_samples_s"] for kept in kept_in(database) if kept["kind"] == "measurement"]
        assert steps == [[1e-3]]


def test_samples_that_cannot_be_are_not_stored(path: Path) -> None:
    bad = replace(FAST, raw=replace(SAMPLES, step_samples_s=(1e-3, nan)))
    with (
        Database(path) as database,
        pytest.raises(InvalidInputError, match=r"step_samples_s is \(0.001, nan\); it must be sec"),
    ):
        database.add(HERE, PROBLEM, 1, bad)


def test_nothing_that_is_read_to_choose_carries_them(path: Path) -> None:
    with Database(path) as database:
        (measured,) = database.measurements(HERE, PROBLEM, VERSIONS)
        run = database.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS)
    assert measured.raw is None
    assert run is not None
    assert run.raw is None
