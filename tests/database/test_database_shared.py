"""The database file while others use it: deleted, replaced, locked, opened by a thread or process that is another."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.database_rows import FAILED, FAST, HERE, PROBLEM, VERSIONS, change, fill
from support.places import TESTS

from mucudnn.database import sqlite_file
from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.words.errors import DatabaseError
from mucudnn.words.results import Measurement, MicroConfig


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fill(tmp_path / "full.sqlite")


def sized(size: int) -> Measurement:
    return replace(FAST, micro_config=MicroConfig("gemm", size))


def add(database: Database, *sizes: int) -> None:
    for size in sizes:
        database.add(HERE, PROBLEM, 1, sized(size))


def sizes_in(path: Path) -> list[int]:
    with Database(path, read_only=True, create=False) as database:
        return [m.micro_config.micro_batch_size for m in database.measurements(HERE, PROBLEM, VERSIONS)]


def check(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


# Deleted or replaced


def delete_all(path: Path) -> None:
    for name in ("", "-wal", "-shm"):
        Path(f"{path}{name}").unlink(missing_ok=True)


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved.sqlite"))


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


JOURNALS = pytest.mark.parametrize("journal", ["WAL", "DELETE"])


@JOURNALS
@pytest.mark.parametrize("lose", [Path.unlink, delete_all, move_away, delete_folder])
def test_what_a_run_added_survives_that_its_file_is_deleted(
    tmp_path: Path, lose: Callable[[Path], None], journal: str
) -> None:
    (tmp_path / "folder").mkdir()
    path = fill(tmp_path / "folder" / "full.sqlite")
    change(path, f"PRAGMA journal_mode = {journal}")
    with Database(path) as database:
        add(database, 1, 2)
        lose(path)
        with pytest.warns(UserWarning, match=f"database {path} was deleted while it was in use") as told:
            add(database, 3)
        add(database, 4)
        assert len(told) == 1
    assert sizes_in(path) == [1, 2, 3, 4]
    check(path)


@JOURNALS
def test_what_a_run_added_goes_into_the_database_that_replaces_its_own(
    path: Path, tmp_path: Path, journal: str
) -> None:
    change(path, f"PRAGMA journal_mode = {journal}")
    other = tmp_path / "other.sqlite"
    with Database(other) as database:
        add(database, 16, 32)
    with Database(path) as database:
        add(database, 1, 2)
        other.replace(path)
        with pytest.warns(UserWarning, match=f"database {path} was replaced while it was in use"):
            add(database, 3)
        assert [m.micro_config.micro_batch_size for m in database.measurements(HERE, PROBLEM, VERSIONS)] == [
            *(1, 2, 3, 16, 32)
        ]
    assert sizes_in(path) == [1, 2, 3, 16, 32]
    check(path)  # SQLite would write the log of the old file into the new one, were it not emptied


def test_what_was_added_last_survives_as_well(path: Path) -> None:
    database = Database(path)
    add(database, 1, 2)
    path.unlink()
    with pytest.warns(UserWarning, match="was deleted"):
        database.close()
    assert sizes_in(path) == [1, 2]


def test_who_added_nothing_brings_nothing_back(path: Path) -> None:
    with Database(path) as database:
        assert database.failures(HERE, PROBLEM, VERSIONS) == (FAILED,)
        path.unlink()
    assert not path.exists()


def test_another_folder_is_no_other_file(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Database(path.name) as database:
        add(database, 1)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        add(database, 2)
        path.unlink()
        with pytest.warns(UserWarning, match="was deleted"):
            add(database, 4)
    assert sizes_in(path) == [1, 2, 4]
    assert [*(tmp_path / "elsewhere").iterdir()] == []


def test_a_file_that_is_replaced_by_no_database_is_said_and_kept(path: Path) -> None:
    with Database(path) as database:
        store = EnvironmentStore(database, HERE)
        store.add(PROBLEM, 1, sized(1))
        path.unlink()
        path.write_text("my diary")
        with pytest.warns(UserWarning, match=f"its measurements are not stored: database {path} is not an SQLite"):
            store.add(PROBLEM, 1, sized(2))
        store.add(PROBLEM, 1, sized(3))
        assert sized(1) in store.results(PROBLEM, VERSIONS)  # what was known still is
    assert path.read_text() == "my diary"


# Locked


@JOURNALS
def test_a_file_that_is_emptied_where_it_is_is_said(path: Path, journal: str) -> None:
    """The file is emptied as ``> file`` does: it is no other file, and nothing of it can be saved."""
    change(path, f"PRAGMA journal_mode = {journal}")
    database = Database(path)
    add(database, 64)
    path.write_bytes(b"")
    with pytest.raises(DatabaseError, match="was emptied while it was in use"):
        add(database, 65)
    with pytest.warns(UserWarning, match="the latest measurements are not stored: .* was emptied"):
        database.close()


def test_it_says_once_that_it_waits(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "_PATIENCE_S", 0.01)
    holder = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    with Database(path) as database, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for size in (1, 2):
            holder.execute("BEGIN IMMEDIATE")
            timer = threading.Timer(0.1, holder.execute, ["COMMIT"])
            timer.start()
            add(database, size)
            timer.join()
    holder.close()
    assert [str(warning.message) for warning in told] == [
        f"database {path} is locked by another process: waiting for up to 60 s until it is done"
    ]
    assert sizes_in(path) == [1, 2, 8]


def test_it_says_that_it_waits_before_it_gives_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "_PATIENCE_S", 0.01)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with Database(path, timeout_s=0.05) as database:
        with (
            pytest.raises(DatabaseError, match="locked by another process; wait"),
            pytest.warns(UserWarning, match="wai"),
        ):
            add(database, 1)
        holder.execute("COMMIT")
        add(database, 1)
    holder.close()


# Threads and processes


def test_another_thread_is_refused(path: Path) -> None:
    refusals = []

    def use() -> None:
        for action in (lambda: add(database, 1), lambda: database.failures(HERE, PROBLEM, VERSIONS), database.prune):
            with pytest.raises(DatabaseError, match=r"was opened by another thread.*open it again here") as refusal:
                action()
            refusals.append(refusal)
        database.close()

    with Database(path) as database:
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert len(refusals) == 3
        assert database.failures(HERE, PROBLEM, VERSIONS) == (FAILED,)


FORK = """
import os, sys
sys.path[:0] = sys.argv[2:]
from test_database_shared import *
path = Path(sys.argv[1])
with Database(path) as database:
    add(database, 1)
    child = os.fork()
    if child == 0:
        with database:
            for action in (lambda: add(database, 99), lambda: database.failures(HERE, PROBLEM, VERSIONS)):
                with pytest.raises(DatabaseError, match="before this process was forked"):
                    action()
        with Database(path) as own:
            add(own, 2)
        del database
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert Path(f"{path}-wal").exists()
    add(database, 3)
"""


def test_a_forked_process_must_open_its_own(path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", FORK, str(path), str(Path(__file__).parent), str(TESTS)], env=environment, check=True
    )
    assert sizes_in(path) == [1, 2, 3, 8]
    check(path)
