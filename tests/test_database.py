"""The database: what is stored comes back, whatever happens to processes and files meanwhile."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.configuration import Failure, Measurement, MicroConfig
from mucudnn.database import Database, EnvironmentRows, MergeCounts, Verification, default_path
from mucudnn.environment import Environment
from mucudnn.errors import DatabaseError
from mucudnn.problem import ConvProblem, MemoryFormat, Operation

HERE = Environment("AMD EPYC", "AVX512", 2, "2.13.0", "oneDNN 3.12.0", "avx512")
PROBLEM = ConvProblem(Operation.FORWARD, 64, 27, 28, 192, 5, 4, (1, 2), (2, 1), (1, 3), 2)
FAST = Measurement(MicroConfig("gemm", 8), 1e-6, 2.5e-3, 64, 2**40, 1e-16, 0.01, 5)
FAILED = Failure(MicroConfig("fft", 8), "out of memory")
VERSIONS = {"gemm": 1, "fft": 1}

NUMBERS = st.floats(min_value=0) | st.just(math.nan)
COUNTS = st.integers(0, 2**62)
MICRO_CONFIGS = st.builds(MicroConfig, st.sampled_from(sorted(VERSIONS)), st.integers(1, 64))
MEASUREMENTS = st.builds(Measurement, MICRO_CONFIGS, NUMBERS, NUMBERS, COUNTS, COUNTS, NUMBERS, NUMBERS, COUNTS)
FAILURES = st.builds(Failure, MICRO_CONFIGS, st.text())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a database with one measurement, one failure and one verification."""
    path = tmp_path / "full.sqlite"
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, FAST)
        database.add_failure(HERE, PROBLEM, 1, FAILED)
        database.add_verification(HERE, PROBLEM, [FAST.micro_config], VERSIONS, Verification(2.0, 1.0, 0.1))
    return path


def same(a: object, b: object) -> bool:
    """Equality for which NaN is equal to itself."""
    return repr(a) == repr(b)


@settings(max_examples=50, deadline=None)
@given(st.lists(MEASUREMENTS | FAILURES, max_size=12))
def test_newest_of_each_micro_config_comes_back(added: list[Measurement | Failure]) -> None:
    expected: dict[MicroConfig, Measurement | Failure] = {}
    with Database(":memory:") as database:
        for item in added:
            add = database.add if isinstance(item, Measurement) else database.add_failure
            add(HERE, PROBLEM, 1, item)  # type: ignore[arg-type]
            expected[item.micro_config] = item
        newest = [expected[micro_config] for micro_config in sorted(expected)]
        assert same(
            database.measurements(HERE, PROBLEM, VERSIONS), tuple(m for m in newest if isinstance(m, Measurement))
        )
        assert database.failures(HERE, PROBLEM, VERSIONS) == tuple(f for f in newest if isinstance(f, Failure))


OTHER_ENVIRONMENTS = [
    *(replace(HERE, device="x"), replace(HERE, capability="AVX2"), replace(HERE, threads=1)),
    *(replace(HERE, torch="2.14.0"), replace(HERE, library="oneDNN 4.0.0"), replace(HERE, compiled="torch")),
]
OTHER_PROBLEMS = [
    *(replace(PROBLEM, **{name: getattr(PROBLEM, name) + 2}) for name in ("c", "h", "w", "k", "r", "s")),
    *(replace(PROBLEM, stride=(2, 1)), replace(PROBLEM, padding=(1, 2)), replace(PROBLEM, dilation=(3, 1))),
    *(replace(PROBLEM, groups=1), replace(PROBLEM, dtype="float64")),
    replace(PROBLEM, memory_format=MemoryFormat.CHANNELS_LAST),
    PROBLEM.with_operation(Operation.BACKWARD_DATA),
]


def test_the_key_tests_vary_every_field() -> None:
    for key, others in ((HERE, OTHER_ENVIRONMENTS), (PROBLEM, OTHER_PROBLEMS)):
        varied = {f.name for o in others for f in fields(key) if getattr(o, f.name) != getattr(key, f.name)}
        assert varied == {f.name for f in fields(key)}


@pytest.mark.parametrize("environment", OTHER_ENVIRONMENTS)
def test_other_environments_see_nothing(path: Path, environment: Environment) -> None:
    assert rows_of(path, environment, PROBLEM) == ((), (), None)


@pytest.mark.parametrize("problem", OTHER_PROBLEMS)
def test_other_problems_have_nothing(path: Path, problem: ConvProblem) -> None:
    assert rows_of(path, HERE, problem) == ((), (), None)


@pytest.mark.parametrize("versions", [{"gemm": 2, "fft": 2}, {"gemm": 0, "fft": 0}])
def test_other_versions_have_nothing(path: Path, versions: dict[str, int]) -> None:
    assert rows_of(path, HERE, PROBLEM, versions) == ((), (), None)


def test_only_algorithms_asked_for_come_back(path: Path) -> None:
    with Database(path) as database:
        assert database.measurements(HERE, PROBLEM, {"fft": 1}) == ()
        assert database.failures(HERE, PROBLEM, {"fft": 1}) == (FAILED,)


def rows_of(
    path: Path, environment: Environment, problem: ConvProblem, versions: dict[str, int] = VERSIONS
) -> tuple[object, ...]:
    with Database(path) as database:
        return (
            database.measurements(environment, problem, versions),
            database.failures(environment, problem, versions),
            database.verification(environment, problem, [FAST.micro_config], versions),
        )


FULL = ((FAST,), (FAILED,), Verification(2.0, 1.0, 0.1))


def test_verifications_are_of_one_very_configuration(path: Path) -> None:
    eight, four = MicroConfig("gemm", 8), MicroConfig("gemm", 4)
    with Database(path) as database:
        database.add_verification(HERE, PROBLEM, [eight, four, four], VERSIONS, Verification(3.0, 2.0, math.nan))
        database.add_verification(HERE, PROBLEM, [eight, four, four], VERSIONS, Verification(4.0, 2.0, math.nan))
        found = database.verification(HERE, PROBLEM, [eight, four, four], VERSIONS)
        assert same(found, Verification(4.0, 2.0, math.nan))
        assert database.verification(HERE, PROBLEM, [eight], VERSIONS) == FULL[2]
        for other in ([eight, four], [four, four, eight], [eight, four, four, four]):
            assert database.verification(HERE, PROBLEM, other, VERSIONS) is None


def test_default_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MUCUDNN_DATABASE", "named.sqlite")
    assert default_path() == Path("named.sqlite")
    monkeypatch.delenv("MUCUDNN_DATABASE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "mucudnn" / "measurements.sqlite"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_path() == Path.home() / ".cache" / "mucudnn" / "measurements.sqlite"


def test_missing_folders_are_made(tmp_path: Path) -> None:
    with Database(tmp_path / "a" / "b%20?c" / "new.sqlite") as database:
        database.add(HERE, PROBLEM, 1, FAST)
    assert (tmp_path / "a" / "b%20?c" / "new.sqlite").is_file()


def test_a_file_system_without_write_ahead_log_will_do(path: Path) -> None:
    change(path, "PRAGMA journal_mode = DELETE")
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, FAST)
    assert rows_of(path, HERE, PROBLEM) == FULL


# Faults of the file: what is wrong, where, what to do; and the file stays as it is


def truncate(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def raise_version(path: Path) -> None:
    change(path, "PRAGMA user_version = 99")


def change(path: Path, sql: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(sql)
    connection.close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"no database " * 1000), "is not an SQLite database"),
        (lambda path: path.write_bytes(path.read_bytes()[:60]), "is damaged"),
        (truncate, "is damaged"),
        (raise_version, r"schema 99, of a newer mucudnn \(this one knows 1\): upgrade"),
        (lambda path: change(path, "PRAGMA application_id = 7"), "belongs to another program"),
    ],
)
def test_unusable_files_are_refused_and_kept(path: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(path)
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=f"{path} .*{message}.*--database or MUCUDNN_DATABASE"):
        Database(path)
    assert path.read_bytes() == before


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="cannot be opened"):
        Database(tmp_path)


def test_missing_database_is_not_made_for_reading(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"missing\.sqlite does not exist; name another"):
        Database(tmp_path / "missing.sqlite", read_only=True)


def test_locked_longer_than_the_timeout(path: Path) -> None:
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with Database(path, timeout_s=0.01) as database:
        with pytest.raises(DatabaseError, match="is locked by another process; wait"):
            database.add(HERE, PROBLEM, 1, FAST)
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)  # readers need not wait
        holder.execute("COMMIT")
        database.add(HERE, PROBLEM, 1, FAST)
    holder.close()


def test_read_only_reads_and_refuses_to_write(path: Path) -> None:
    with Database(path, read_only=True) as database:
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)
        with pytest.raises(DatabaseError, match=r"can only be read; change its permissions"):
            database.add(HERE, PROBLEM, 1, FAST)


def test_copy_in_memory_takes_more_and_leaves_the_file(path: Path) -> None:
    slower = replace(FAST, step_s=1.0)
    with Database(path, read_only=True) as database, database.copy_in_memory() as copy:
        copy.add(HERE, PROBLEM, 1, slower)
        assert copy.measurements(HERE, PROBLEM, VERSIONS) == (slower,)
        assert copy.failures(HERE, PROBLEM, VERSIONS) == (FAILED,)
    assert rows_of(path, HERE, PROBLEM) == FULL


@pytest.fixture
def unwritable(path: Path) -> Iterator[Path]:
    """The same database in a folder that this process may not write, even where the tests run as root."""
    folder = Path(tempfile.mkdtemp())
    copy = Path(shutil.copy(path, folder))
    copy.chmod(0o444)
    folder.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield copy
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_unwritable_files_are_opened_for_reading(unwritable: Path) -> None:
    with Database(unwritable) as database:
        assert database.read_only
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (FAST,)
    with pytest.raises(DatabaseError, match="does not exist, and cannot be made in that folder"):
        Database(unwritable.parent / "new.sqlite")


# Processes

WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_database import FAST, HERE, PROBLEM, replace, Database, MicroConfig
with Database(sys.argv[1]) as database:
    for size in range(1, int(sys.argv[4]) + 1):
        database.add(HERE, PROBLEM, 1, replace(FAST, micro_config=MicroConfig(sys.argv[2], size)))
        print(size, flush=True)
"""


def start_writer(path: Path, algorithm: str, rows: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(path), algorithm, str(Path(__file__).parent), str(rows)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_sigkill_keeps_every_committed_row(tmp_path: Path) -> None:
    path = tmp_path / "killed.sqlite"
    with start_writer(path, "gemm", 10**6) as writer:
        assert writer.stdout is not None
        while int(writer.stdout.readline()) < 20:
            pass
        writer.send_signal(signal.SIGKILL)
        committed = max([20, *map(int, writer.stdout.read().splitlines())])
    with Database(path) as database:
        kept = [m.micro_config.micro_batch_size for m in database.measurements(HERE, PROBLEM, VERSIONS)]
        assert kept == list(range(1, len(kept) + 1))
        assert len(kept) in (committed, committed + 1)  # one may be committed and not yet printed
        database.add(HERE, PROBLEM, 1, FAST)  # and it goes on


def test_two_processes_make_and_fill_one_database(tmp_path: Path) -> None:
    path = tmp_path / "shared.sqlite"
    writers = [start_writer(path, algorithm, 200) for algorithm in ("gemm", "fft")]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    with Database(path) as database:
        found = {m.micro_config for m in database.measurements(HERE, PROBLEM, VERSIONS)}
    assert found == {MicroConfig(algorithm, size) for algorithm in ("gemm", "fft") for size in range(1, 201)}


# Upkeep


def test_info_counts_rows_by_environment(path: Path) -> None:
    elsewhere = replace(HERE, threads=1)
    with Database(path) as database:
        database.add(elsewhere, PROBLEM, 1, FAST)
        info = database.info()
    assert info.path == path
    assert info.size_bytes > 0
    assert info.environments == (EnvironmentRows(elsewhere, 1, 0, 0), EnvironmentRows(HERE, 1, 1, 1))


def test_exports_have_every_row_and_value(path: Path) -> None:
    as_csv, as_json = io.StringIO(), io.StringIO()
    with Database(path) as database:
        database.export_csv(as_csv)
        database.export_json_lines(as_json)
    records = [json.loads(line) for line in as_json.getvalue().splitlines()]
    assert [record["kind"] for record in records] == ["measurement", "failure", "verification"]
    assert records[0]["step_s"] == FAST.step_s
    assert records[1]["reason"] == "out of memory"
    assert (records[2]["baseline_s"], json.loads(records[2]["configuration"])) == (2.0, [["gemm", 1, 8, 1]])
    assert all((r["device"], r["stride_w"], r["memory_format"]) == ("AMD EPYC", 2, "contiguous") for r in records)
    texts = [{name: str(value) for name, value in record.items()} for record in records]
    lines = list(csv.DictReader(io.StringIO(as_csv.getvalue())))
    assert [{name: text for name, text in line.items() if text} for line in lines] == texts


def test_merge_is_the_union(path: Path, tmp_path: Path) -> None:
    newer, elsewhere = replace(FAST, step_s=9.0), replace(HERE, threads=1)
    with Database(tmp_path / "other.sqlite") as other:
        other.add(elsewhere, PROBLEM, 1, FAST)
        other.add(HERE, PROBLEM, 1, newer)
    with Database(tmp_path / "union.sqlite") as union:
        assert union.merge(other.path) == MergeCounts(added=2, known=0, incompatible=0)
        assert union.merge(path) == MergeCounts(added=3, known=0, incompatible=0)
        assert union.merge(path) == MergeCounts(added=0, known=3, incompatible=0)
        assert union.measurements(HERE, PROBLEM, VERSIONS) == (newer,)  # by its time, although it was merged first
        assert union.measurements(elsewhere, PROBLEM, VERSIONS) == (FAST,)
    assert rows_of(path, HERE, PROBLEM) == FULL


def test_merge_passes_over_problems_it_does_not_know(path: Path) -> None:
    change(path, "UPDATE problems SET dtype = 'float4'")
    with Database(":memory:") as database:
        assert database.merge(path) == MergeCounts(added=0, known=0, incompatible=3)


def test_merge_with_what_is_no_database_changes_nothing(path: Path) -> None:
    other = path.with_name("other.sqlite")
    other.write_text("no database")
    with Database(path) as database, pytest.raises(DatabaseError, match=r"other\.sqlite"):
        database.merge(other)
    assert rows_of(path, HERE, PROBLEM) == FULL


@pytest.mark.parametrize(
    ("choice", "removed", "left"),
    [
        ({}, 1, FULL),
        ({"environment": HERE}, 2, FULL),
        ({"environment": replace(HERE, threads=9)}, 5, ((), (), None)),
        ({"versions": {"gemm": 1}}, 2, ((FAST,), (), FULL[2])),
        ({"versions": {"fft": 1}}, 4, ((), (FAILED,), None)),
        ({"versions": {}}, 5, ((), (), None)),
    ],
)
def test_prune(path: Path, choice: dict[str, Any], removed: int, left: tuple[object, ...]) -> None:
    """Five rows, one of them superseded and one from elsewhere."""
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, FAST)
        database.add(replace(HERE, threads=1), PROBLEM, 1, FAST)
        assert database.prune(**choice, dry_run=True) == removed
        assert rows_of(path, HERE, PROBLEM) == FULL
        assert database.prune(**choice) == removed
        assert rows_of(path, HERE, PROBLEM) == left
        assert database.prune(**choice) == 0
