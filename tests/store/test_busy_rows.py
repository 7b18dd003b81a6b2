"""The load in the database: what was measured on a busy machine replaces nothing that was not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from support.database_rows import FAST, HERE, PROBLEM, VERSIONS

from mucudnn.core.records import (
    BUSY,
    Comparison,
    Failure,
    Measurement,
    MicroConfig,
)
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines, read_profile
from mucudnn.store.schema import configuration_key, whole_run_from

UNKNOWN, QUIET, LATER = (replace(FAST, step_s=s, load=load) for s, load in ((1.0, None), (2.0, 0.0), (3.0, BUSY)))
BUSIER, BUSIEST = (replace(FAST, step_s=s, load=load) for s, load in ((4.0, BUSY + 0.01), (5.0, 1.0)))
REFUSED = Failure(FAST.micro_config, "it fails")


def stored(database: Database, results: Sequence[Measurement | Failure]) -> Measurement | Failure:
    """The one that counts of those that were added in this order."""
    for result in results:
        (database.add if isinstance(result, Measurement) else database.add_failure)(HERE, PROBLEM, 1, result)  # type: ignore[operator]
    return that_counts(database)


def that_counts(database: Database) -> Measurement | Failure:
    (one,) = (*database.measurements(HERE, PROBLEM, VERSIONS), *database.failures(HERE, PROBLEM, VERSIONS))
    of_all = database.measurements_of_all(HERE, [PROBLEM], VERSIONS)[PROBLEM]
    assert of_all == ((one,) if isinstance(one, Measurement) else ())
    return one


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([QUIET, BUSIER], QUIET),
        ([UNKNOWN, BUSIER], UNKNOWN),
        ([BUSIEST, QUIET], QUIET),
        ([BUSIEST, UNKNOWN], UNKNOWN),
        ([QUIET, LATER], LATER),
        ([UNKNOWN, QUIET, BUSIER, BUSIEST], QUIET),
        ([BUSIEST, BUSIER], BUSIER),
        ([BUSIER, REFUSED], REFUSED),
        ([QUIET, REFUSED, BUSIER], REFUSED),
        ([REFUSED, QUIET, BUSIER], QUIET),
    ],
)
def test_what_was_disturbed_counts_only_where_there_is_nothing_else(
    added: list[Measurement | Failure], expected: Measurement | Failure, tmp_path: Path
) -> None:
    with Database(tmp_path / "some.sqlite") as database:
        assert stored(database, added) == expected
        assert [row["load"] for row in database.every_row()] == [getattr(expected, "load", None)]


def test_merging_is_the_union_in_any_order() -> None:
    parts = []
    for result in (QUIET, BUSIER, UNKNOWN):
        parts.append(Database(":memory:"))
        stored(parts[-1], [result])
    for order in permutations(parts):
        with Database(":memory:") as union:
            for part in order:
                union.merge(part)
            assert that_counts(union) == UNKNOWN, "the newest of those that were not disturbed"
            assert union.info()[0].measurements == 1


def test_a_whole_run_under_load_replaces_no_other() -> None:
    runs = [Comparison(2.0, 1.0, 0.1, load) for load in (0.9, 0.05, 0.5)]
    with Database(":memory:") as database:
        for run, expected in zip(runs, (runs[0], runs[1], runs[1]), strict=True):
            database.add_whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS, run)
            assert database.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS) == expected
            assert database.whole_runs(HERE, PROBLEM, VERSIONS) == {(FAST.micro_config,): expected}


def test_the_key_of_a_whole_run_tells_what_ran() -> None:
    parts = (MicroConfig("gemm", 8), MicroConfig("gemm", 8), MicroConfig("native", 4))
    versions = {"gemm": 1, "native": 2, "fft": 3}
    for fresh in (False, True):
        key = configuration_key(parts, versions, fresh=fresh)
        found, found_versions, is_fresh = whole_run_from(key)
        assert (found, is_fresh) == (parts, fresh)
        assert found_versions.items() <= versions.items()
        assert json.loads(configuration_key(found, found_versions, fresh=is_fresh)) == json.loads(key)


def test_exporting_keeps_whole_runs_with_a_fresh_workspace(tmp_path: Path) -> None:
    runs = {fresh: Comparison(2.0 + fresh, 1.0, 0.1, 0.0) for fresh in (False, True)}
    key = (HERE, PROBLEM, [MicroConfig("gemm", 8)], {"gemm": 1, "native": 1, "fft": 1})
    with Database(tmp_path / "some.sqlite") as database:
        for fresh, run in runs.items():
            for added in (replace(run, time_s=3.0), run):  # the second replaces the first
                database.add_whole_run(*key, added, fresh=fresh)
        with (tmp_path / "a.jsonl").open("w") as stream:
            export_json_lines(database, stream)
        with read_profile(tmp_path / "a.jsonl") as read, Database(tmp_path / "merged.sqlite") as merged:
            merged.merge(read)
            for one in (database, read, merged):
                assert len(one.every_row()) == 2
                assert {fresh: one.whole_run(*key, fresh=fresh) for fresh in runs} == runs
