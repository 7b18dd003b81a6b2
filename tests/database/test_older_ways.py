"""The way of measuring in the database: old times are kept and used, and never beside newer ones of their problem."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.database_rows import FAST, HERE, OLD, PROBLEM, VERIFIED, VERSIONS, change, fill

from mucudnn.database.database import Database
from mucudnn.database.profiles import read_profile
from mucudnn.database.selection import select_measurements
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import METHOD, Failure, Measurement, MicroConfig, WholeRun, passed_over, too_large
from mucudnn.words.task import Task

OTHER_SIZE = MicroConfig("gemm", 4)
OLD_TOO = replace(OLD, micro_config=OTHER_SIZE)
NEW = replace(FAST, step_s=7.0)
BUSY_NEW = replace(NEW, load=0.9)
OLD_RUN = replace(VERIFIED, method=METHOD - 1)
OTHER_PROBLEM = replace(PROBLEM, c=2 * PROBLEM.c)


@pytest.fixture
def database() -> Iterator[Database]:
    with Database(":memory:") as opened:
        yield opened


def add(database: Database, *measurements: Measurement) -> None:
    for measurement in measurements:
        database.add(HERE, PROBLEM, 1, measurement)


def add_run(database: Database, run: WholeRun, *parts: MicroConfig) -> None:
    database.add_whole_run(HERE, PROBLEM, parts, VERSIONS, run)


def measured(database: Database) -> tuple[Measurement, ...]:
    """What every way of reading them agrees on."""
    found = database.measurements(HERE, PROBLEM, VERSIONS)
    assert sorted(database.measurements_of_all(HERE, [PROBLEM], VERSIONS)[PROBLEM], key=key) == list(found)
    counting = [row.values for row in database.rows_that_count(HERE) if row.values["kind"] == "measurement"]
    assert sorted(row["step_s"] for row in counting if row["c"] == PROBLEM.c) == sorted(m.step_s for m in found)
    return found


def key(measurement: Measurement) -> MicroConfig:
    return measurement.micro_config


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ([OLD, OLD_TOO], (OLD_TOO, OLD)),
        ([OLD, OLD_TOO, NEW], (NEW,)),
        ([NEW, OLD, OLD_TOO], (NEW,)),
        ([OLD, OLD_TOO, BUSY_NEW], (BUSY_NEW,)),
        ([BUSY_NEW, OLD], (BUSY_NEW,)),
    ],
)
def test_all_candidates_of_a_problem_are_measured_in_one_way(
    added: Sequence[Measurement], expected: tuple[Measurement, ...], database: Database
) -> None:
    add(database, *added)
    database.add(HERE, OTHER_PROBLEM, 1, OLD)
    assert measured(database) == expected
    assert database.measurements(HERE, OTHER_PROBLEM, VERSIONS) == (OLD,), "of that problem nothing newer is known"


def test_nothing_is_lost(database: Database) -> None:
    add(database, OLD, OLD_TOO, NEW)
    assert database.info().environments[0].measurements == 3
    assert database.prune() == 1, "the one that a newer one of the same candidate replaces"
    assert database.info().environments[0].measurements == 2
    assert measured(database) == (NEW,)


def test_a_failure_counts_whatever_the_way(database: Database) -> None:
    add(database, OLD, OLD_TOO)
    failure = Failure(OTHER_SIZE, "it fails")
    database.add_failure(HERE, PROBLEM, 1, failure)
    assert measured(database) == (OLD,)
    assert database.failures(HERE, PROBLEM, VERSIONS) == (failure,)


def test_whole_runs_of_older_ways_count_until_anything_newer_is_known(database: Database) -> None:
    eight, halves = (FAST.micro_config,), (OTHER_SIZE, OTHER_SIZE)
    add(database, OLD)
    for parts in (eight, halves):
        add_run(database, OLD_RUN, *parts)
    assert database.whole_runs(HERE, PROBLEM, VERSIONS) == {eight: OLD_RUN, halves: OLD_RUN}
    with database.copy_in_memory() as copy:
        add_run(copy, VERIFIED, *eight)
        assert copy.whole_runs(HERE, PROBLEM, VERSIONS) == {eight: VERIFIED}
        assert copy.whole_run(HERE, PROBLEM, halves, VERSIONS) is None
    add(database, NEW)
    assert database.whole_runs(HERE, PROBLEM, VERSIONS) == {}
    assert database.whole_run(HERE, PROBLEM, eight, VERSIONS) is None
    assert [row.values["kind"] for row in database.rows_that_count(HERE)] == ["measurement"]


def test_older_ways_are_doubtful(database: Database) -> None:
    add(database, OLD)
    database.add(HERE, OTHER_PROBLEM, 1, FAST)
    add_run(database, OLD_RUN, FAST.micro_config)
    database.add_failure(HERE, PROBLEM, 1, Failure(OTHER_SIZE, "it fails"))
    assert [row.values["kind"] for row in database.doubtful_rows(HERE)] == ["measurement", "verification"]
    assert database.info().environments[0].doubtful == 2
    add(database, NEW)
    assert not database.doubtful_rows(HERE)


def test_who_solves_from_them_is_told(database: Database) -> None:
    add(database, OLD)
    database.add(HERE, OTHER_PROBLEM, 1, FAST)
    tasks = [Task(PROBLEM, 8), Task(OTHER_PROBLEM, 8)]
    (note,) = select_measurements(database, tasks, BatchSizePolicy.POWER_OF_TWO).notes
    assert note.startswith("1 of 2 convolutions were measured in an older way")
    assert "mucudnn database refresh" in note
    assert not select_measurements(database, tasks[1:], BatchSizePolicy.POWER_OF_TWO).notes


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_exports_have_the_way_and_what_was_passed_over(form: str, tmp_path: Path, database: Database) -> None:
    failures = (
        Failure(MicroConfig("fft", 1), "it fails"),
        passed_over(MicroConfig("fft", 2), "3.0 times the fastest in like problems"),
        too_large(MicroConfig("fft", 4), 2**40),
    )
    add(database, OLD)
    add_run(database, OLD_RUN, FAST.micro_config)
    for failure in failures:
        database.add_failure(HERE, PROBLEM, 1, failure)
    stream = io.StringIO()
    (database.export_csv if form == "csv" else database.export_json_lines)(stream)
    (path := tmp_path / f"rows.{form}").write_text(stream.getvalue(), newline="")
    with read_profile(path) as read, Database(":memory:") as merged:
        merged.merge(read)
        for found in (read, merged, database):
            assert found.measurements(HERE, PROBLEM, VERSIONS) == (OLD,)
            assert found.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS) == OLD_RUN
            assert found.failures(HERE, PROBLEM, VERSIONS) == failures


def test_the_text_of_what_was_too_large_is_made_of_its_bytes() -> None:
    failure = too_large(OTHER_SIZE, 80)
    assert (failure.reason, failure.needed_bytes, failure.is_passed_over) == ("needs 80 bytes of workspace", 80, True)
    assert failure.why == "passed over: needs 80 bytes of workspace"
    text = Failure(OTHER_SIZE, failure.reason)
    assert (text.needed_bytes, text.is_passed_over) == (None, False), "what a text says decides nothing"


@pytest.mark.parametrize("method", [0, METHOD + 1, 1.0, True, None, "cold"])
def test_a_way_that_there_is_not_is_refused(method: object, database: Database) -> None:
    with pytest.raises(InvalidInputError, match=rf"method is .*a whole number of at least 1 and at most {METHOD}"):
        add(database, replace(FAST, method=method))


@pytest.mark.parametrize(("column", "value"), [("passed_over", "0"), ("needed_bytes", "-1"), ("needed_bytes", "'80'")])
def test_a_failure_with_a_bad_mark_is_passed_over(column: str, value: str, tmp_path: Path) -> None:
    path = fill(tmp_path / "full.sqlite")
    change(path, f"UPDATE measurements SET {column} = {value} WHERE reason IS NOT NULL")
    with Database(path) as opened:
        with pytest.warns(UserWarning, match=f"1 bad row.*{column} is "):
            assert opened.failures(HERE, PROBLEM, VERSIONS) == ()
        assert opened.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)


@pytest.mark.parametrize("column", ["passed_over", "needed_bytes"])
def test_a_measurement_is_no_failure(column: str, tmp_path: Path) -> None:
    path = fill(tmp_path / "full.sqlite")
    change(path, f"UPDATE measurements SET {column} = 1 WHERE reason IS NULL")
    with Database(path) as opened, pytest.warns(UserWarning, match="a measurement has no such value"):
        assert opened.measurements(HERE, PROBLEM, VERSIONS) == ()
