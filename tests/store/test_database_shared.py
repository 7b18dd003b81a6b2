"""The database file while others use it: deleted, replaced, locked, opened by a thread or process that is another."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support.database_rows import FAILED, FAST, HERE, PROBLEM, VERSIONS, change, fill

from mucudnn.core.errors import DatabaseError
from mucudnn.core.records import Measurement, MicroConfig
from mucudnn.store import sqlite_file
from mucudnn.store.database import Database
from mucudnn.store.tuning_store import EnvironmentStore


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


# Deleted, replaced or emptied


def delete(path: Path) -> None:
    path.unlink()


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def replace_by_database(path: Path) -> None:
    other = path.with_name("other.sqlite")
    with Database(other) as database:
        add(database, 16, 32)
    other.replace(path)


def replace_by_text(path: Path) -> None:
    path.unlink()
    path.write_text("my diary")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved.sqlite"))


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_a_file_that_was_deleted_replaced_or_emptied_takes_no_rows(tmp_path: Path, journal: str) -> None:
    for lose, what in (
        *((delete, "deleted"), (delete_folder, "deleted"), (move_away, "deleted")),
        *((replace_by_database, "replaced"), (replace_by_text, "replaced"), (empty, "emptied")),
    ):
        folder = tmp_path / lose.__name__
        folder.mkdir()
        path = fill(folder / "full.sqlite")
        change(path, f"PRAGMA journal_mode = {journal}")
        with Database(path) as database:
            store = EnvironmentStore(database, HERE)
            store.add(PROBLEM, 1, sized(1))
            lose(path)
            with pytest.raises(DatabaseError, match=f"database {path} was {what} while it was in use"):
                add(database, 2)
            with pytest.warns(UserWarning, match="its measurements are not stored: "):
                store.add(PROBLEM, 1, sized(2))
            store.add(PROBLEM, 1, sized(3))
    check(tmp_path / "replace_by_database" / "full.sqlite")  # the log of the old file is not applied to the new one
    assert sizes_in(tmp_path / "replace_by_database" / "full.sqlite") == [16, 32]
    assert (tmp_path / "replace_by_text" / "full.sqlite").read_text() == "my diary"
    assert sizes_in(tmp_path / "move_away" / "moved.sqlite") == [1, 8]


# Locked


def test_it_says_once_that_it_waits_and_gives_up_in_the_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        holder.execute("BEGIN IMMEDIATE")
        with (
            Database(path, timeout_s=0.05) as hasty,
            pytest.raises(DatabaseError, match="locked by another process; wait"),
        ):
            add(hasty, 4)
        holder.execute("COMMIT")
        add(database, 4)
    holder.close()
    waits = f"database {path} is locked by another process: waiting for up to {{}} s until it is done"
    assert [str(warning.message) for warning in told] == [waits.format(60), waits.format(0)]
    assert sizes_in(path) == [1, 2, 4, 8]


# Threads and processes


def test_another_thread_is_refused(path: Path) -> None:
    refusals = []

    def use() -> None:
        for action in (lambda: add(database, 1), lambda: database.failures(HERE, PROBLEM, VERSIONS), database.info):
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
