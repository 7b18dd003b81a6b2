"""Damaged databases: a file that cannot be used is refused with what to do, and a bad row is as good as not there."""

from __future__ import annotations

import io
import random
import shutil
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.database_rows import FAILED, FAST, FULL, HERE, PROBLEM, VERIFIED, VERSIONS, change, fill, rows_of
from support.effort import how_many

from mucudnn.core.errors import DatabaseError, InvalidInputError
from mucudnn.core.records import Comparison, Environment
from mucudnn.store.database import Database
from mucudnn.store.exports import export_json_lines
from mucudnn.store.tuning_store import EnvironmentStore

NO_TEXT = b"\xff\xfe"
REFUSED = [  # a statement with a parameter, and what that is
    *(
        ("UPDATE measurements SET step_s = ? WHERE reason IS NULL", value)
        for value in (-1e-3, None, float("inf"), "fast")
    ),
    ("UPDATE measurements SET noise = ? WHERE reason IS NULL", b"\0" * 999),
    ("UPDATE measurements SET scratch_bytes = ? WHERE reason IS NULL", 0.5),
    ("UPDATE measurements SET prepared_bytes = ? WHERE reason IS NULL", 2**48 + 1),
    ("UPDATE measurements SET samples = ? WHERE reason IS NULL", 0),
    ("UPDATE measurements SET version = ? WHERE reason IS NULL", "one"),
    ("UPDATE measurements SET algorithm = ? WHERE reason IS NULL", ""),
    ("UPDATE measurements SET micro_batch_size = ? WHERE reason IS NULL", -8),
    ("UPDATE measurements SET measured_at = ? WHERE reason IS NULL", "now"),
    ("UPDATE measurements SET reason = ? WHERE reason IS NULL", "none"),
    ("UPDATE measurements SET reason = ? WHERE reason IS NOT NULL", None),
    ("UPDATE measurements SET passed_over = ? WHERE reason IS NULL", 1),
    ("UPDATE measurements SET passed_over = ? WHERE reason IS NOT NULL", 3),
    ("UPDATE measurements SET environment_id = ? WHERE reason IS NULL", 99),
    ("UPDATE measurements SET problem_id = ? WHERE reason IS NULL", 99),
    ("UPDATE verifications SET time_s = ?", 0.0),
    ("UPDATE verifications SET configuration = ?", '[["gemm"'),
    ("UPDATE measurements SET step_samples_s = ? WHERE reason IS NULL", b""),
    ("UPDATE measurements SET setup_samples_s = ? WHERE reason IS NULL", b"\0" * 9),
    ("UPDATE measurements SET setup_samples_s = ? WHERE reason IS NULL", "[1.0]"),
    ("UPDATE environments SET threads = ?", "many"),
    ("UPDATE environments SET device = ?", NO_TEXT),
    ("UPDATE problems SET c = ?", "many"),
    ("UPDATE problems SET dtype = ?", "float4"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fill(tmp_path / "full.sqlite")


def damage(path: Path, sql: str, value: object) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(sql, [value])


def test_no_program_stores_values_that_there_cannot_be(path: Path) -> None:
    for sql, value in REFUSED:
        with pytest.raises(sqlite3.IntegrityError):
            damage(path, sql, value)
    assert rows_of(path, HERE, PROBLEM) == FULL


# What is added


def test_rows_that_there_cannot_be_are_not_stored(path: Path) -> None:
    with Database(path) as database:
        store = EnvironmentStore(database, HERE)
        for measurement, expected in (
            (replace(FAST, step_s=float("nan")), "a measurement has all costs, and a failure none"),
            (
                replace(FAST, prepared_bytes=2**48 + 1),
                "prepared_bytes must be a whole number, from 0 to 2814749767",
            ),
            (replace(FAST, scratch_bytes=2**63), "Python int too large"),
            (replace(FAST, samples=0), "samples must be a whole number, at least 1"),
            (replace(FAST, load=1.1), "load must be from 0 to 1"),
        ):
            with pytest.raises(InvalidInputError, match=f"this measurement of forward .* cannot be stored: {expected}"):
                database.add(HERE, PROBLEM, 1, measurement)
            with pytest.warns(UserWarning, match=f"tuning goes on, but will measure this again: .*{expected}"):
                store.add(PROBLEM, 1, measurement)
        with pytest.raises(InvalidInputError, match="threads"):
            database.add(replace(HERE, threads="many"), PROBLEM, 1, FAST)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="surrogates not allowed"):
            database.add_failure(HERE, PROBLEM, 1, replace(FAILED, reason="\udcff"))
        with pytest.raises(InvalidInputError, match="baseline_s must be finite and above 0"):
            database.add_whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS, replace(VERIFIED, baseline_s=0.0))
        assert rows_of(path, HERE, PROBLEM) == FULL
        store.add(PROBLEM, 1, replace(FAST, step_s=5.0))
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (replace(FAST, step_s=5.0),)


# Files


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        *(
            (
                lambda path, n=n: change(path, f"PRAGMA user_version = {n}"),
                f"has schema {n}, of another mucudnn, and this one reads 10 only",
            )
            for n in (-1, 0, 9, 999)
        ),
        (lambda path: change(path, "PRAGMA application_id = -1"), "belongs to another program"),
        *((lambda path, size=size: path.write_bytes(path.read_bytes()[:size]), "is damaged") for size in (60, 4096)),
        (lambda path: path.write_bytes(b"no database " * 1000), "is not an SQLite database"),
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


# Random damage


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


def exercise(path: Path) -> None:
    """Every public method: it works, or it warns, or it raises mucudnn's own error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for use in (read_everything, write_everything, export_everything, merge_everything):
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
                database.measurements(environment, problem, versions)
                database.failures(environment, problem, versions)
                found = database.whole_run(environment, problem, [FAST.micro_config], VERSIONS)
                assert found is None or isinstance(found, Comparison)
            database.measurements_of_all(environment, database.problems(environment), versions)
        database.info()


def write_everything(path: Path) -> None:
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, FAST)
        database.add_failure(HERE, PROBLEM, 1, FAILED)
        database.add_whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS, VERIFIED)


def export_everything(path: Path) -> None:
    with Database(path, read_only=True) as database:
        export_json_lines(database, io.StringIO())


def merge_everything(path: Path) -> None:
    with Database(path, read_only=True) as source, Database(":memory:") as database:
        database.merge(source)
