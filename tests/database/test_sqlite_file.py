"""The database file among faults and other processes: what is committed stays, what is unusable is refused and kept."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.database_rows import (
    FAILED,
    FAST,
    FULL,
    HERE,
    MIGRATED,
    OLD,
    PROBLEM,
    SAMPLES,
    VERIFIED,
    VERSIONS,
    change,
    fill,
    rows_of,
)
from support.places import DATA, TESTS

from mucudnn.database import migrations, schema
from mucudnn.database.database import Database
from mucudnn.database.profiles import read_profile
from mucudnn.database.samples import unpacked
from mucudnn.words.errors import DatabaseError
from mucudnn.words.results import (
    Failure,
    How,
    MicroConfig,
    WholeRun,
    WithCachedFilter,
    WithFreshWorkspace,
    passed_over,
    too_large,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fill(tmp_path / "full.sqlite")


def test_a_file_system_without_write_ahead_log_will_do(path: Path) -> None:
    change(path, "PRAGMA journal_mode = DELETE")
    with Database(path) as database:
        database.add(HERE, PROBLEM, 1, FAST)
    assert rows_of(path, HERE, PROBLEM) == FULL


def truncate(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size // 2)


def raise_version(path: Path) -> None:
    change(path, "PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"no database " * 1000), "is not an SQLite database"),
        (lambda path: path.write_bytes(path.read_bytes()[:60]), "is damaged"),
        (truncate, "is damaged"),
        (raise_version, r"schema 99, of a newer mucudnn \(this one knows 6\): upgrade"),
        (lambda path: change(path, "PRAGMA application_id = 7"), "belongs to another program"),
    ],
)
def test_unusable_files_are_refused_and_kept(path: Path, damage: Callable[[Path], Any], message: str) -> None:
    damage(path)
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=rf"{path} .*{message}.*Config\(database=\.\.\.\) or MUCUDNN_DATABASE"):
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
from dataclasses import replace
from support.database_rows import FAST, HERE, PROBLEM, Database, MicroConfig
with Database(sys.argv[1]) as database:
    for size in range(1, int(sys.argv[4]) + 1):
        database.add(HERE, PROBLEM, 1, replace(FAST, micro_config=MicroConfig(sys.argv[2], size)))
        print(size, flush=True)
"""


def start_writer(path: Path, algorithm: str, rows: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(path), algorithm, str(TESTS), str(rows)]
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


# Files of earlier versions


def of_version(version: int, folder: Path) -> Path:
    """A file as it was written by that schema."""
    path = folder / f"version-{version}.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript((DATA / f"version-{version}.sql").read_text())
    connection.close()
    return path


@pytest.fixture
def version_1(tmp_path: Path) -> Path:
    """``fill`` as it was written by the first schema."""
    return of_version(1, tmp_path)


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    """The same by the second schema, with whole runs of torch's own, with a fresh workspace, with a cached filter."""
    return of_version(2, tmp_path)


@pytest.fixture
def version_3(tmp_path: Path) -> Path:
    """The rows of version 2, as the third schema had them."""
    return of_version(3, tmp_path)


def dump(path: Path) -> list[str]:
    connection = sqlite3.connect(path)
    statements = list(connection.iterdump())
    connection.close()
    return statements


def version_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return int(version)


def test_a_file_of_version_1_is_migrated_and_takes_more(version_1: Path) -> None:
    on_gpu = replace(HERE, numerics="TF32")
    assert rows_of(version_1, HERE, PROBLEM) == MIGRATED
    with Database(version_1) as database:
        database.add(on_gpu, PROBLEM, 1, FAST)
        assert database.environments() == (HERE, on_gpu)
        assert database.failures(on_gpu, PROBLEM, VERSIONS) == ()
    connection = sqlite3.connect(version_1)
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    connection.close()
    assert version_of(version_1) == migrations.VERSION


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_a_migrated_file_has_the_tables_of_a_new_one(version: int, path: Path) -> None:
    older = of_version(version, path.parent)
    with Database(older):
        pass
    tables = []
    for file in (older, path):
        connection = sqlite3.connect(file)
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        tables.append(
            {
                name: [
                    connection.execute(f"PRAGMA {pragma}({name})").fetchall()
                    for pragma in ("table_info", "foreign_key_list", "index_list")
                ]
                for name in names
            }
        )
        connection.close()
    assert tables[0] == tables[1]


def test_a_file_of_version_1_is_read_as_it_is(version_1: Path) -> None:
    before = version_1.read_bytes()
    with Database(version_1, read_only=True) as database:
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (OLD,)
        assert database.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS) == MIGRATED[2]
        with pytest.raises(DatabaseError, match=r"can only be read; change its permissions"):
            database.add(HERE, PROBLEM, 1, FAST)
        with database.copy_in_memory() as copy:
            copy.add(replace(HERE, numerics="TF32"), PROBLEM, 1, FAST)
            assert len(copy.environments()) == 2
    assert version_1.read_bytes() == before
    assert version_of(version_1) == 1


def test_a_file_of_version_1_is_merged_without_being_changed(version_1: Path, tmp_path: Path) -> None:
    with Database(tmp_path / "new.sqlite") as database:
        assert database.merge(version_1).added == 3
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (OLD,)
    assert version_of(version_1) == 1


def test_a_migration_that_fails_leaves_the_file_as_it_was(version_1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dump(version_1)
    with monkeypatch.context() as patch:
        patch.setitem(migrations.MIGRATIONS, 1, (*migrations.MIGRATIONS[1], "DROP TABLE of_another_name"))
        with pytest.raises(DatabaseError, match="cannot be used"):
            Database(version_1)
    assert (version_of(version_1), dump(version_1)) == (1, before)
    assert rows_of(version_1, HERE, PROBLEM) == MIGRATED


GEMM, TORCHS = MicroConfig("gemm", 8), MicroConfig("native", 8)
OURS, THEIRS, AS_STORED = (WholeRun(2.0, time_s, 0.1, method=1) for time_s in (1.00003, 2.0, 1.0))
WHOLE_RUNS: list[tuple[list[MicroConfig], How, WholeRun]] = [
    ([GEMM], None, OURS),
    ([TORCHS], None, THEIRS),
    ([MicroConfig("native", 4)] * 2, None, OURS),
    ([GEMM], WithFreshWorkspace(), OURS),
    ([TORCHS], WithFreshWorkspace(), THEIRS),
    ([GEMM], WithCachedFilter("gemm", (TORCHS,)), AS_STORED),  # past the operator
]


def whole_runs(database: Database) -> list[tuple[list[MicroConfig], How, WholeRun | None]]:
    versions = {**VERSIONS, "native": 1}
    return [(run, how, database.whole_run(HERE, PROBLEM, run, versions, how)) for run, how, _ in WHOLE_RUNS]


@pytest.mark.parametrize("read_only", [False, True])
def test_older_whole_runs_get_what_the_operator_costs(version_2: Path, read_only: bool) -> None:
    before = version_2.read_bytes()
    for _ in range(2):  # once, however often the file is opened
        with Database(version_2, read_only=read_only) as database:
            assert whole_runs(database) == WHOLE_RUNS
    assert (version_2.read_bytes() == before) is read_only
    assert version_of(version_2) == (2 if read_only else migrations.VERSION)


def test_older_whole_runs_are_merged_with_what_the_operator_costs(version_2: Path) -> None:
    with Database(":memory:") as database:
        assert database.merge(version_2).added == 2 + len(WHOLE_RUNS)
        assert whole_runs(database) == WHOLE_RUNS


@pytest.mark.parametrize("name", ["version-2.csv", "version-2.jsonl"])
def test_exports_of_version_2_are_read_as_the_database_is(name: str) -> None:
    with read_profile(DATA / name) as read:
        assert whole_runs(read) == WHOLE_RUNS


def test_files_of_version_3_have_an_unknown_load(version_3: Path) -> None:
    disturbed, older = replace(OLD, step_s=9.0, load=0.9), replace(OLD, step_s=3.0)
    with Database(version_3) as database:
        assert whole_runs(database) == WHOLE_RUNS
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (OLD,)
        assert OLD.load is None
        assert database.best_rate(HERE) == 0.0
        database.add(HERE, PROBLEM, 1, disturbed)
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (OLD,)
        database.add(HERE, PROBLEM, 1, older)
        assert database.measurements(HERE, PROBLEM, VERSIONS) == (older,)
    assert version_of(version_3) == migrations.VERSION


@pytest.mark.parametrize("name", ["version-3.csv", "version-3.jsonl"])
def test_exports_of_version_3_are_read_as_the_database_is(name: str) -> None:
    with read_profile(DATA / name) as read:
        assert whole_runs(read) == WHOLE_RUNS
        assert read.measurements(HERE, PROBLEM, VERSIONS) == (OLD,)


NOT_MEASURED = {
    Failure(FAILED.micro_config, FAILED.reason),
    passed_over(MicroConfig("direct", 4), "3.0 times the fastest in like problems"),
    too_large(MicroConfig("gemm", 4), 12345),
}


def of_version_4(database: Database) -> None:
    """Rows with a load are of today's way of measuring; what was passed over is said in columns."""
    direct = replace(OLD, micro_config=MicroConfig("direct", 8), load=0.0, method=2)
    versions = {**VERSIONS, "direct": 1}
    assert database.measurements(HERE, PROBLEM, versions) == (direct,)
    assert set(database.failures(HERE, PROBLEM, versions)) == NOT_MEASURED


def test_files_of_version_4_say_how_they_were_measured(path: Path) -> None:
    with Database(of_version(4, path.parent)) as database:
        of_version_4(database)
        assert database.best_rate(HERE) == 123.0


@pytest.mark.parametrize("name", ["version-4.csv", "version-4.jsonl"])
def test_exports_of_version_4_are_read_as_the_database_is(name: str) -> None:
    with read_profile(DATA / name) as read:
        of_version_4(read)


def of_version_5(database: Database) -> None:
    """All that there was, without samples; what is added has them."""
    assert database.measurements(HERE, PROBLEM, VERSIONS) == (replace(FAST, load=0.0),)
    assert database.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS) == VERIFIED
    raw = (*schema.SAMPLE_COLUMNS, *schema.PROCESSOR)
    assert {row.values[name] for row in database.sound_rows() for name in raw} == {None}
    assert len(database.sound_rows()) == 14


def test_files_of_version_5_have_no_samples_and_take_some(path: Path) -> None:
    with Database(of_version(5, path.parent)) as database:
        of_version_5(database)
        database.add(HERE, PROBLEM, 1, FAST)
        (*_, newest) = database.sound_rows()
        assert unpacked(newest.values["step_samples_s"]) == SAMPLES.step_samples_s
        assert database.bad_rows() == []


@pytest.mark.parametrize("name", ["version-5.csv", "version-5.jsonl"])
def test_exports_of_version_5_are_read_as_the_database_is(name: str) -> None:
    with read_profile(DATA / name) as read:
        of_version_5(read)


@pytest.mark.parametrize(
    ("column", "value"), [("configuration", value) for value in ("[5", '["gemm"]', "5", "{}", b"\xff", 3)]
    + [("time_s", value) for value in ("soon", None, 0, -1.0, b"\xff")],
)  # fmt: skip
def test_bad_whole_runs_of_older_files_stay_bad(version_2: Path, column: str, value: object) -> None:
    connection = sqlite3.connect(version_2)
    with connection:
        connection.execute(f"UPDATE verifications SET {column} = ? WHERE measured_at LIKE '%02+00:00'", [value])
    connection.close()
    with Database(version_2) as database:
        assert [row.values["kind"] for row in database.bad_rows()] == ["verification"]
        with pytest.warns(UserWarning, match="1 bad row"):
            assert whole_runs(database)[1:] == WHOLE_RUNS[1:]


def test_what_was_exported_by_this_version_is_read_as_it_is(path: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported.jsonl"
    with Database(path) as database, exported.open("w") as stream:
        database.export_json_lines(stream)
    with read_profile(exported) as read:
        assert read.whole_run(HERE, PROBLEM, [FAST.micro_config], VERSIONS) == FULL[2]


def test_exports_of_a_newer_version_are_refused(path: Path, tmp_path: Path) -> None:
    exported = tmp_path / "exported.jsonl"
    with Database(path) as database, exported.open("w") as stream:
        database.export_json_lines(stream)
    exported.write_text(
        exported.read_text().replace(f'"schema": {migrations.VERSION}', f'"schema": {migrations.VERSION + 1}')
    )
    with pytest.raises(
        DatabaseError, match=f"schema is {migrations.VERSION + 1}; it must be .* at most {migrations.VERSION}"
    ):
        read_profile(exported)
