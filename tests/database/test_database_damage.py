"""Damaged databases: a file that cannot be used is refused with what to do, and a bad row is as good as not there."""

from __future__ import annotations

import io
import random
import shutil
import sqlite3
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_line import fail
from support.database_rows import FAILED, FAST, FULL, HERE, PROBLEM, VERIFIED, VERSIONS, change, fill, rows_of
from support.effort import how_many

from mucudnn.database import schema
from mucudnn.database.column_rules import row_faults
from mucudnn.database.contents import MergeCounts
from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.database.profiles import open_stored
from mucudnn.running.environment import Environment
from mucudnn.words.errors import DatabaseError, InvalidInputError
from mucudnn.words.results import Failure, MicroConfig, WholeRun

NO_TEXT = b"\xff\xfe"
BAD_ROWS = [  # a statement with a parameter, what that is, and what is said
    ("UPDATE measurements SET step_s = ? WHERE reason IS NULL", -1e-3, "step_s is -0.001; it must be seconds, finite"),
    ("UPDATE measurements SET step_s = ? WHERE reason IS NULL", None, "step_s is missing; it must be seconds"),
    ("UPDATE measurements SET step_s = ? WHERE reason IS NULL", float("inf"), "step_s is inf; it must be seconds"),
    ("UPDATE measurements SET step_s = ? WHERE reason IS NULL", "fast", "step_s is 'fast'; it must be seconds"),
    (
        "UPDATE measurements SET noise = ? WHERE reason IS NULL",
        b"\0" * 999,
        r"noise is b'\\x00.*\.\.\. \(3999 characters\); it must be",
    ),
    ("UPDATE measurements SET scratch_bytes = ? WHERE reason IS NULL", 0.5, "scratch_bytes is 0.5; it must be a whole"),
    ("UPDATE measurements SET samples = ? WHERE reason IS NULL", 0, "samples is 0; it must be a whole number"),
    ("UPDATE measurements SET version = ? WHERE reason IS NULL", "1", "version is '1'; it must be a whole number"),
    ("UPDATE measurements SET algorithm = ? WHERE reason IS NULL", 7, "algorithm is 7; it must be the name"),
    ("UPDATE measurements SET algorithm = CAST(? AS TEXT) WHERE reason IS NULL", NO_TEXT, r"algorithm is '\\udcff"),
    ("UPDATE measurements SET micro_batch_size = ? WHERE reason IS NULL", -8, "micro_batch_size is -8; it must be"),
    ("UPDATE measurements SET measured_at = ? WHERE reason IS NULL", "now", "measured_at is 'now'; it must be a time"),
    ("UPDATE measurements SET reason = ? WHERE reason IS NULL", "none", "setup_s is 1e-06; a failure has no such"),
    (
        "UPDATE measurements SET reason = ? WHERE reason IS NOT NULL",
        b"no",
        "reason is b'no'; it must be text",
    ),
    ("UPDATE measurements SET environment_id = ? WHERE reason IS NULL", 99, "device is missing; it must be text"),
    ("UPDATE measurements SET problem_id = ? WHERE reason IS NULL", 99, "operation is missing; it must be one of"),
    ("UPDATE verifications SET time_s = ?", 0.0, "time_s is 0.0; it must be seconds, finite and above 0"),
    (
        "UPDATE verifications SET configuration = ?",
        '[["gemm"',
        "configuration is .*gemm.*; it must be runs",
    ),
    (
        "UPDATE measurements SET step_samples_s = ? WHERE reason IS NULL",
        struct.pack("<3d", 1e-3, float("nan"), 2e-3),
        r"step_samples_s is \[0.001, nan, 0.002\]; it must be a list of seconds, each finite",
    ),
    ("UPDATE measurements SET step_samples_s = ? WHERE reason IS NULL", b"", "step_samples_s is b''; it must be a li"),
    ("UPDATE measurements SET setup_samples_s = ? WHERE reason IS NULL", b"\0" * 9, r"setup_samples_s is b'\\x00"),
    ("UPDATE measurements SET setup_samples_s = ? WHERE reason IS NULL", "[1.0]", "setup_samples_s is '.1.0.'; it "),
    ("UPDATE measurements SET stolen = ? WHERE reason IS NULL", 2, "stolen is 2; it must be a number from 0 to 1"),
    ("UPDATE measurements SET clock_hz = ? WHERE reason IS NOT NULL", 2e9, "clock_hz is .*; a failure has no such"),
    ("UPDATE verifications SET baseline_samples_s = ?", struct.pack("<d", -1.0), r"baseline_samples_s is \[-1.0\]; it"),
    ("UPDATE environments SET threads = ?", "many", "threads is 'many'; it must be a whole number"),
    ("UPDATE environments SET device = CAST(? AS TEXT)", NO_TEXT, r"device is '\\udcff\\udcfe'; it must be text"),
    ("UPDATE problems SET groups = ?", 5, "not a convolution: groups is 5; it must divide"),
    ("UPDATE problems SET c = ?", "many", "c is 'many'; it must be a whole number"),
    ("UPDATE problems SET dtype = ?", 3.5, "dtype is 3.5; it must be one of"),
]
EVERY_TABLE = ("environments", "problems", "measurements", "verifications")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fill(tmp_path / "full.sqlite")


def damage(path: Path, sql: str, value: object) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(sql, [value])
    connection.close()


def used(path: Path) -> tuple[list[Any], list[str]]:
    """Everything that every way to read gives, and the warnings."""
    with warnings.catch_warnings(record=True) as told, Database(path, read_only=True) as database:
        warnings.simplefilter("always")
        found: list[Any] = []
        for environment in (*database.environments(), HERE):
            versions = {name: every[-1] for name, every in database.versions(environment).items()}
            for problem in (*database.problems(environment), PROBLEM):
                found += database.measurements(environment, problem, versions)
                found += database.failures(environment, problem, versions)
                found += database.measurements_of_all(environment, [problem], versions)[problem]
                found += filter(None, [database.whole_run(environment, problem, [FAST.micro_config], VERSIONS)])
        database.info()
        with database.copy_in_memory() as copy:
            copy.add(HERE, PROBLEM, 1, FAST)
    return found, [str(warning.message) for warning in told]


@pytest.mark.parametrize(("sql", "value", "expected"), BAD_ROWS)
def test_bad_rows_are_passed_over_and_said(path: Path, sql: str, value: object, expected: str) -> None:
    good, nothing = used(path)
    assert {type(row) for row in good} == {type(row) for row in (FAST, FAILED, VERIFIED)}
    assert not nothing
    damage(path, sql, value)
    left, told = used(path)
    assert 0 <= len(left) < len(good)
    assert all(row in good for row in left)
    with pytest.warns(UserWarning, match=expected), Database(path) as database:
        database.info()
    assert len(told) == 1
    assert f"database {path} has " in told[0]
    assert " bad row" in told[0]
    assert "passed over as if nothing had been measured: table " in told[0]
    assert "mucudnn database prune removes " in told[0]


@pytest.mark.parametrize(("sql", "value", "expected"), BAD_ROWS)
def test_prune_removes_bad_rows_and_no_others(path: Path, sql: str, value: object, expected: str) -> None:
    damage(path, sql, value)
    with Database(path) as database:
        bad = database.bad_rows()
        rows = 3 if "environments" in sql or "problems" in sql else 1
        assert len(bad) == rows
        assert database.prune(dry_run=True) == database.prune() == rows
        assert database.bad_rows() == []
        database.info()  # and nothing is to be warned of
        database.add(HERE, PROBLEM, 1, FAST)
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)
    check(path)


@pytest.mark.parametrize(("sql", "value", "expected"), BAD_ROWS)
def test_bad_rows_are_neither_merged_nor_exported(
    path: Path, tmp_path: Path, sql: str, value: object, expected: str
) -> None:
    damage(path, sql, value)
    rows = 3 if "environments" in sql or "problems" in sql else 1
    with Database(tmp_path / "new.sqlite") as target:
        with pytest.warns(UserWarning, match=expected):
            assert target.merge(path) == MergeCounts(added=3 - rows, known=0, incompatible=0, bad=rows)
        assert target.bad_rows() == []
    for export in (Database.export_csv, Database.export_json_lines):
        stream = io.StringIO(newline="")
        with Database(path, read_only=True) as database, pytest.warns(UserWarning, match=expected):
            export(database, stream)
        (tmp_path / "rows").write_text(stream.getvalue(), newline="")
        if rows == 1:
            with open_stored(tmp_path / "rows") as profile:
                assert profile.environments() == (HERE,)


def test_names_that_a_later_version_may_know_are_not_bad(path: Path) -> None:
    change(path, "UPDATE problems SET dtype = 'float4'")
    with Database(path) as database:
        assert database.info().environments[0].measurements == 1
        assert database.problems(HERE) == frozenset()
        assert (database.bad_rows(), database.prune()) == ([], 0)


def test_a_bad_row_does_not_take_the_place_of_a_sound_one(path: Path) -> None:
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, replace(FAST, step_s=7.0))
    change(path, "UPDATE measurements SET step_s = -7.0 WHERE step_s = 7.0")
    with pytest.warns(UserWarning, match="1 bad row"):
        assert rows_of(path, HERE, PROBLEM) == FULL
    with Database(path) as database:
        assert database.prune() == 1
    assert rows_of(path, HERE, PROBLEM) == FULL


def test_what_a_bad_row_was_of_is_measured_again(path: Path) -> None:
    change(path, "UPDATE measurements SET noise = 'loud' WHERE reason IS NULL")
    with Database(path) as database:
        store = EnvironmentStore(database, HERE)
        with pytest.warns(UserWarning, match="1 bad row"):
            assert store.results(PROBLEM, VERSIONS) == [FAILED]
        store.add(PROBLEM, 1, FAST)
        assert store.results(PROBLEM, VERSIONS) == [FAST, FAILED]


# What is added


@pytest.mark.parametrize(
    ("measurement", "expected"),
    [
        (replace(FAST, step_s=float("nan")), "step_s is nan; it must be seconds"),
        (replace(FAST, prepared_bytes=2**48 + 1), "prepared_bytes is 281474976710657; .* at most 281474976710656"),
        (replace(FAST, scratch_bytes=2**63), "scratch_bytes is 9223372036854775808; it must be a whole number"),
        (replace(FAST, samples=0), "samples is 0"),
    ],
)
def test_values_that_there_cannot_be_are_not_stored(path: Path, measurement: Any, expected: str) -> None:
    with Database(path) as database:
        with pytest.raises(InvalidInputError, match=f"this measurement of forward .* cannot be stored: {expected}"):
            database.add(HERE, PROBLEM, 1, measurement)
        store = EnvironmentStore(database, HERE)
        with pytest.warns(UserWarning, match=f"tuning goes on, but will measure this again: .*{expected}"):
            store.add(PROBLEM, 1, measurement)
        store.add(PROBLEM, 1, replace(FAST, step_s=5.0))
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (replace(FAST, step_s=5.0),)


def test_other_rows_that_there_cannot_be_are_not_stored(path: Path) -> None:
    with Database(path) as database:
        with pytest.raises(InvalidInputError, match="threads"):
            database.add(replace(HERE, threads="many"), PROBLEM, 1, FAST)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match=r"reason is '\\udcff'"):
            database.add_failure(HERE, PROBLEM, 1, replace(FAILED, reason="\udcff"))
        with pytest.raises(InvalidInputError, match=r"baseline_s is 0\.0"):
            database.add_whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS, replace(VERIFIED, baseline_s=0.0))
    assert rows_of(path, HERE, PROBLEM) == FULL


# Files


def test_failures_are_removed_on_demand(path: Path) -> None:
    measured_before = Failure(FAST.micro_config, "too large")
    with Database(path) as database:
        database.add_failure(HERE, PROBLEM, 1, measured_before)
        assert database.prune(failures=True, dry_run=True) == 3
        assert database.failures(HERE, PROBLEM, VERSIONS) == (FAILED, measured_before)
        assert database.prune(failures=True) == 3  # what it superseded is gone, too: it is measured again
    assert rows_of(path, HERE, PROBLEM) == ((), (), FULL[2])


def rebuilt(table: str, sql: str) -> Callable[[Path], None]:
    """Makes a table anew by other SQL."""

    def apply(path: Path) -> None:
        connection = sqlite3.connect(path)
        connection.executescript(f"PRAGMA foreign_keys = OFF; DROP TABLE {table}; {sql}")
        connection.close()

    return apply


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda path: change(path, "PRAGMA user_version = -1"), "is damaged: it has schema -1, which there never was"),
        (lambda path: change(path, "PRAGMA user_version = 0"), "is damaged: it has schema 0, which there never was"),
        (lambda path: change(path, "PRAGMA user_version = 999"), "has schema 999, of a newer mucudnn"),
        (lambda path: change(path, "PRAGMA user_version = 1"), "cannot be used .duplicate column name: numerics"),
        (lambda path: change(path, "PRAGMA application_id = -1"), "belongs to another program"),
        (lambda path: change(path, "ALTER TABLE measurements DROP COLUMN noise"), "measurements lacks column noise;"),
        (
            lambda path: change(path, "ALTER TABLE measurements ADD COLUMN colour"),
            "table measurements has what no mucudnn made, column colour",
        ),
        (
            lambda path: change(path, "ALTER TABLE problems RENAME COLUMN c TO channels"),
            "table problems lacks column c; unique key of operation, c, h",
        ),
        (lambda path: change(path, "DROP TABLE verifications"), "damaged: it has no table verifications"),
        (
            rebuilt("environments", f"CREATE TABLE environments (id INTEGER PRIMARY KEY, {schema.ENVIRONMENT})"),
            "table environments lacks unique key of device, capability",
        ),
        (
            rebuilt(
                "environments",
                "CREATE TABLE environments (id INTEGER PRIMARY KEY, capability, device, threads, torch, library, "
                f"compiled, numerics, UNIQUE ({schema.ENVIRONMENT}))",
            ),
            "table environments has its columns in another order",
        ),
        (
            lambda path: change(path, "CREATE UNIQUE INDEX mine ON measurements (reason)"),
            "no mucudnn made, unique key of reason",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:4096]), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"REFERENCES", b"\xff" * 10)), "is damaged"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be opened"),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_files_that_cannot_be_used_say_so(
    path: Path, break_it: Callable[[Path], Any], expected: str, read_only: bool
) -> None:
    break_it(path)
    before = path.read_bytes() if path.is_file() else b""
    remedy = r"Config\(database=\.\.\.\) or MUCUDNN_DATABASE"
    with pytest.raises(DatabaseError, match=f"database {path} .*({expected}).*{remedy}"):
        Database(path, read_only=read_only)
    assert (path.read_bytes() if path.is_file() else b"") == before


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "loop"])
@pytest.mark.parametrize("read_only", [False, True])
def test_names_that_no_file_can_have(tmp_path: Path, name: str, read_only: bool) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DatabaseError, match=r"cannot be opened: .*; name another file with Config\(database="):
        Database(tmp_path / name, read_only=read_only)
    assert [path.name for path in tmp_path.iterdir()] == ["loop"]


def test_indexes_of_the_user_do_no_harm(path: Path) -> None:
    change(path, "CREATE INDEX mine ON measurements (step_s)")
    assert rows_of(path, HERE, PROBLEM) == FULL


@pytest.mark.parametrize("command", ["info", "export", "prune"])
def test_an_empty_file_has_nothing_and_stays_empty(tmp_path: Path, command: str) -> None:
    path = tmp_path / "empty.sqlite"
    path.touch()
    target = [tmp_path / "rows.csv"] if command == "export" else []
    assert f"database {path} is empty" in fail("database", command, *target, "--database", path)
    assert path.read_bytes() == b""
    assert not (tmp_path / "rows.csv").exists()


# Random damage


NASTY = [
    *(None, -1, 0, 0.5, -0.0, 1e308, float("inf"), 2**63 - 1, -(2**63), "", "many", "[]", "[[", "nan", b"", NO_TEXT),
    *("forward", "float16", "x" * 10_000, "\0", 64, "2026-01-31T12:00:00.000000+00:00", '[["gemm", 1, 8, 1]]'),
]


def columns_of(path: Path, table: str) -> list[str]:
    connection = sqlite3.connect(path)
    names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    connection.close()
    return names


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(how_many(20, 1000)))
def test_random_values_in_random_rows(path: Path, seed: int) -> None:
    """Whatever is believed keeps the rules, and what was not touched is still there after pruning."""
    draw = random.Random(seed)
    for _ in range(draw.choice([1, 1, 2, 5])):
        table = draw.choice(EVERY_TABLE)
        column, cast = draw.choice(columns_of(path, table)), draw.choice(["?", "?", "CAST(? AS TEXT)"])
        with suppress(sqlite3.IntegrityError):  # such as a key that is NULL
            damage(path, f"UPDATE {table} SET {column} = {cast} WHERE random() % 2 = 0", draw.choice(NASTY))
    exercise(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Database(path) as database:
            database.prune()
            assert database.bad_rows() == []
    exercise(path)
    check(path)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(how_many(20, 1000)))
def test_random_bytes_of_the_file(path: Path, seed: int) -> None:
    draw = random.Random(seed)
    content = bytearray(path.read_bytes())
    match draw.choice(["flip", "flip", "flip", "cut", "zeros"]):
        case "flip":
            for _ in range(draw.choice([1, 3, 30])):
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        case "cut":
            del content[draw.randrange(len(content)) :]
        case "zeros":
            start = draw.randrange(len(content))
            content[start : start + 500] = bytes(500)
    path.write_bytes(content)
    exercise(path)


def test_a_write_ahead_log_of_another_file(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with Database(other) as database:
        for size in range(1, 50):
            database.add(HERE, PROBLEM, 1, replace(FAST, micro_config=MicroConfig("gemm", size)))
        shutil.copy(f"{other}-wal", f"{path}-wal")
    exercise(path)


def exercise(path: Path) -> None:
    """Every public method: it works, or it warns, or it raises mucudnn's own error; what it gives keeps the rules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for use in (read_everything, write_everything, export_everything, merge_everything, prune_everything):
            copy = path.with_name("copy.sqlite")
            for name in ("", "-wal", "-shm"):
                Path(f"{copy}{name}").unlink(missing_ok=True)
                if Path(f"{path}{name}").exists():
                    shutil.copy(f"{path}{name}", f"{copy}{name}")
            with suppress(DatabaseError):  # any other error is a fault
                use(copy)


def read_everything(path: Path) -> None:
    with Database(path, read_only=True) as database:
        for environment in database.environments():
            assert isinstance(environment, Environment)
            versions = {name: every[-1] for name, every in database.versions(environment).items()}
            for problem in database.problems(environment):
                for measured in database.measurements(environment, problem, versions):
                    assert not faults_of(environment, problem, measured)
                database.failures(environment, problem, versions)
                found = database.whole_run(environment, problem, [FAST.micro_config], VERSIONS)
                assert found is None or isinstance(found, WholeRun)
            database.measurements_of_all(environment, database.problems(environment), versions)
        database.info()


def faults_of(environment: Environment, problem: Any, measured: Any) -> list[str]:
    with Database(":memory:") as database:
        database.add(environment, problem, 1, measured)
        return [fault for row in database.bad_rows() for fault in row_faults(row.values)]


def write_everything(path: Path) -> None:
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, FAST)
        database.add_failure(HERE, PROBLEM, 1, FAILED)
        database.add_whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS, VERIFIED)


def export_everything(path: Path) -> None:
    with Database(path, read_only=True) as database:
        database.export_csv(io.StringIO())
        database.export_json_lines(io.StringIO())


def merge_everything(path: Path) -> None:
    with Database(":memory:") as database:
        database.merge(path)
        assert database.bad_rows() == []


def prune_everything(path: Path) -> None:
    with Database(path) as database:
        database.prune(environments=[HERE], versions=VERSIONS, failures=True)


def check(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
