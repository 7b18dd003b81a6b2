"""An SQLite file shared by several processes, with error messages that name a remedy."""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

from mucudnn.core.errors import DATABASE_OPTION, DatabaseError
from mucudnn.store import schema

MEMORY = Path(":memory:")
_PATIENCE_S = 1.0  # waiting time for another process before a warning

_NAME_ANOTHER = f"name another file with {DATABASE_OPTION} or MUCUDNN_DATABASE"
_MOVE_AWAY = f"it is left unchanged: move it away to start anew, or {_NAME_ANOTHER}"
_NO_SPACE = f"cannot grow: the disk is full, or a quota is used up; what it has is kept; free space, or {_NAME_ANOTHER}"
_EXPLANATIONS = {  # by extended error code, or else by the primary one
    sqlite3.SQLITE_BUSY: f"is locked by another process; wait until that is done, or {_NAME_ANOTHER}",
    sqlite3.SQLITE_CANTOPEN: f"cannot be opened; check the path and its permissions, or {_NAME_ANOTHER}",
    sqlite3.SQLITE_CORRUPT: f"is damaged, perhaps cut off; {_MOVE_AWAY}",
    **dict.fromkeys((sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE), _NO_SPACE),
    **dict.fromkeys((sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_TRUNCATE), _NO_SPACE),
    sqlite3.SQLITE_IOERR: f"cannot be read or written, as its disk or file system fails; mend that, or {_NAME_ANOTHER}",
    sqlite3.SQLITE_NOTADB: f"is not an SQLite database; {_MOVE_AWAY}",
    sqlite3.SQLITE_READONLY: f"can only be read; change its permissions, or {_NAME_ANOTHER}",
}


class SqliteFile:
    """A connection to ``path`` (or to memory, for ``MEMORY``) with the tables of ``schema``, created if missing.

    Files of other programs and versions are rejected. Without ``create`` the file and its tables must exist.
    ``read_only`` is true if requested, or if the file or its folder cannot be written. Every method raises
    ``DatabaseError`` if the file cannot be used, after waiting up to ``timeout_s`` for other processes (with a
    warning), and in threads and processes other than the one that opened the file, where ``close`` does nothing.
    """

    def __init__(self, path: Path, *, read_only: bool, create: bool, timeout_s: float) -> None:
        self.path, self._place = path, path.absolute()  # the working directory may change
        self._opened: os.stat_result | None = None
        self._user = _this_thread()
        self._waits_after_s = max(timeout_s - _PATIENCE_S, 0.0)  # waiting time after a warning; 0 once that was issued
        self._may_make = create and not read_only
        self.read_only = read_only
        if path != MEMORY:
            self._prepare_place()
        uri = "file::memory:"
        if path != MEMORY:
            uri = f"{self._place.as_uri()}?mode={'ro' if self.read_only else 'rwc'}"
            # Readers create a file beside the write-ahead log. If they cannot, and there is no log, open without one.
            if not _allowed(path.parent) and not Path(f"{path}-wal").exists():
                uri += "&immutable=1"
        with self._explained():
            self._connection = sqlite3.connect(uri, uri=True, timeout=min(timeout_s, _PATIENCE_S), isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        # Preserve bytes that are not UTF-8 in a round trip
        self._connection.text_factory = partial(str, encoding="utf-8", errors="surrogateescape")
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        if path != MEMORY:
            self._opened = _status(self._place)

    def close(self) -> None:
        if self._user == _this_thread():
            with suppress(DatabaseError):
                self._require_in_place()
            self._connection.close()

    def require_sound(self) -> None:
        """Raise ``DatabaseError`` if the file is damaged, so that rows may violate their tables' constraints."""
        # In a copy, since SQLite checks no constraints in a read-only file
        with self._explained(), closing(sqlite3.connect(":memory:")) as copy:
            self._connection.backup(copy)
            verdict = copy.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != ("ok",):
            raise self._refused("is damaged")

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._explained():
            return self._when_free(sql, parameters).fetchall()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which is committed at the end, or rolled back on an exception."""
        if self.read_only:
            raise DatabaseError(f"database {self.path} {_EXPLANATIONS[sqlite3.SQLITE_READONLY]}")
        self._require_in_place()
        with self._transaction() as connection:
            yield connection

    def copy_to(self, other: SqliteFile) -> None:
        """Replace the content of ``other`` by a copy of this file's content."""
        with self._explained():
            self._connection.backup(other._connection)

    def _prepare_place(self) -> None:
        """Create the file's folder if the file may be created. Raise ``DatabaseError`` if the file cannot be opened."""
        try:
            is_missing = _status(self.path) is None
            if is_missing and self._may_make:
                make_folder(self.path)
            self.read_only = self.read_only or not _can_be_written(self.path)
            is_folder = self.path.is_dir()
        except (OSError, ValueError) as error:  # a name too long, a loop of links, a null byte
            raise DatabaseError(f"database {self.path} cannot be opened: {error}; {_NAME_ANOTHER}") from error
        if is_folder:
            raise DatabaseError(f"database {self.path} cannot be opened, it is a folder; {_NAME_ANOTHER}")
        if is_missing and (self.read_only or not self._may_make):
            fault = "does not exist, and cannot be created in that folder" if self._may_make else "does not exist"
            raise DatabaseError(f"database {self.path} {fault}; {_NAME_ANOTHER}")

    def _open(self) -> None:
        """Refuse files of other programs and versions, and create the tables if there are none."""
        if self.read("SELECT 1 FROM sqlite_master LIMIT 1"):
            if self._pragma("application_id") != schema.APPLICATION_ID:
                raise self._refused("belongs to another program")
            if (version := self._pragma("user_version")) != schema.VERSION:
                here = f"of another mucudnn, and this one reads {schema.VERSION} only"
                raise self._refused(f"has schema {version}, {here}")
        else:
            if not self._may_make:
                raise self._refused("is empty")
            # Some file systems do not support a write-ahead log; SQLite's rollback journal works too, more slowly.
            with suppress(sqlite3.OperationalError):
                self._connection.execute("PRAGMA journal_mode = WAL")
            with self._transaction():
                if not self.read("SELECT 1 FROM sqlite_master LIMIT 1"):  # another process may have been faster
                    for statement in schema.TABLES:
                        self._connection.execute(statement)
        with self._explained():
            self._connection.execute("PRAGMA foreign_keys = ON")
            if self._pragma("journal_mode") == "wal":  # survives SIGKILL without syncing each commit
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def _require_in_place(self) -> None:
        """Raise ``DatabaseError`` if the file was deleted, replaced or emptied since it was opened."""
        try:
            status = _status(self._place) if self._opened else None
        except OSError:  # the file's state is unknown
            return
        if self._opened is None or (status and status.st_size and os.path.samestat(status, self._opened)):
            return
        fate = "deleted" if status is None else "replaced" if status.st_size else "emptied"
        if fate != "emptied":  # SQLite would apply the old write-ahead log to a new file at the path
            with self._explained():
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        raise DatabaseError(
            f"database {self._place} was {fate} while it was in use, and takes no more rows; start again, or "
            f"{_NAME_ANOTHER}"
        )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._explained(), self._connection:
            self._when_free("BEGIN IMMEDIATE")  # lock first: two processes that read before writing would deadlock
            yield self._connection

    def _when_free(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Execute SQL, waiting for other processes if necessary; warn once if the wait is long."""
        try:
            return self._connection.execute(sql, parameters)
        except sqlite3.OperationalError as error:
            if not self._waits_after_s or _primary_code(error) != sqlite3.SQLITE_BUSY:
                raise
        self._connection.execute(f"PRAGMA busy_timeout = {self._waits_after_s * 1000:.0f}")
        still = f"waiting for up to {self._waits_after_s + _PATIENCE_S:.0f} s until it is done"
        self._waits_after_s = 0.0
        warnings.warn(f"database {self.path} is locked by another process: {still}", stacklevel=2)
        return self._connection.execute(sql, parameters)

    def _refused(self, fault: str) -> DatabaseError:
        return DatabaseError(f"database {self.path} {fault}; {_MOVE_AWAY}")

    def _pragma(self, name: str) -> Any:
        return self.read(f"PRAGMA {name}")[0][0]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        if self._user != _this_thread():
            raise DatabaseError(
                f"database {self.path} was opened by another thread, or before this process was forked; open it again "
                "here"
            )
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a bug in mucudnn, not a fault of the file
        except sqlite3.Error as error:
            explanation = (
                _EXPLANATIONS.get(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR))
                or _EXPLANATIONS.get(_primary_code(error))
                or f"cannot be used ({error}); {_MOVE_AWAY}"
            )
            raise DatabaseError(f"database {self.path} {explanation}") from error
        except UnicodeDecodeError as error:  # SQLite's message may quote a damaged schema
            raise DatabaseError(f"database {self.path} {_EXPLANATIONS[sqlite3.SQLITE_CORRUPT]}") from error


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _this_thread() -> tuple[int, int]:
    return os.getpid(), get_ident()


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file, or None if the file does not exist."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.stat()
    return None


def make_folder(path: Path) -> None:
    """Create the folder of a file if it is missing and can be created."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)


def can_be_opened(path: Path) -> bool:
    """Return whether the file exists, or can be created in its folder."""
    try:
        return path.exists() or _can_be_written(path)
    except OSError:  # a parent folder without permission
        return False


def _can_be_written(path: Path) -> bool:
    """Whether SQLite can write the file ``path`` and the journal files beside it."""
    return _allowed(path.parent) and (not path.exists() or _allowed(path))


def _allowed(path: Path) -> bool:
    # Checked without opening, since closing the file would drop this process's locks on it.
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
