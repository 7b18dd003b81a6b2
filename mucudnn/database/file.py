"""One SQLite file that processes share: opened, checked and never deleted; every error says what to do."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mucudnn.errors import DatabaseError

MEMORY = Path(":memory:")
_MEMORY_URI = "file::memory:"

_NAME_ANOTHER = "name another file with --database or MUCUDNN_DATABASE"
_MOVE_AWAY = f"it is left as it is: move it away to start anew, or {_NAME_ANOTHER}"
_EXPLANATIONS = {
    sqlite3.SQLITE_BUSY: f"is locked by another process; wait until that is done, or {_NAME_ANOTHER}",
    sqlite3.SQLITE_CANTOPEN: f"cannot be opened; check the path and its permissions, or {_NAME_ANOTHER}",
    sqlite3.SQLITE_CORRUPT: f"is damaged, perhaps cut off; {_MOVE_AWAY}",
    sqlite3.SQLITE_FULL: f"cannot grow, the disk is full; free some space, or {_NAME_ANOTHER}",
    sqlite3.SQLITE_NOTADB: f"is not an SQLite database; {_MOVE_AWAY}",
    sqlite3.SQLITE_READONLY: f"can only be read; change its permissions, or {_NAME_ANOTHER}",
}


class DatabaseFile:
    """A connection to ``path`` (or to memory, for ``MEMORY``), whose tables ``schema`` makes where there are none.

    schema: statements that do no harm to a file that has the tables already. application_id: tells our files from
    other programs'. version: of the schema; files of a newer one are refused. migrations: for each older version the
    statements that make it into the next. An older file is migrated when it is opened; if it can only be read it stays
    as it is, and what is read is a migrated copy in memory.

    ``read_only`` is true where it was asked for and where the file or its folder cannot be written. Every method raises
    ``DatabaseError`` where the file cannot be used, after at most ``timeout_s`` of waiting for other processes.
    """

    def __init__(
        self,
        path: Path,
        *,
        schema: str,
        application_id: int,
        version: int,
        migrations: Mapping[int, Sequence[str]],
        read_only: bool,
        timeout_s: float,
    ) -> None:
        self.path = path
        self.read_only = read_only or (path != MEMORY and not _can_be_written(path))
        if self.read_only and not path.exists():
            fault = "does not exist" if read_only else "does not exist, and cannot be made in that folder"
            raise DatabaseError(f"database {path} {fault}; {_NAME_ANOTHER}")
        self._connection = self._connect(self._uri(), timeout_s)
        try:
            self._open(schema, application_id, version)
            self._migrate(migrations, version)
            self._use_foreign_keys()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def read(self, sql: str, parameters: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._explained():
            return self._connection.execute(sql, parameters).fetchall()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction: committed at the end, undone by an exception."""
        if self.read_only:
            raise DatabaseError(f"database {self.path} {_EXPLANATIONS[sqlite3.SQLITE_READONLY]}")
        with self._explained(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")  # the lock first: two that read before they write deadlock
            yield self._connection

    def compact(self) -> None:
        """Give the room of removed rows back to the file system."""
        with self._explained():
            self._connection.execute("VACUUM")

    def copy_to(self, other: DatabaseFile) -> None:
        """Replace everything in ``other``."""
        with self._explained():
            self._connection.backup(other._connection)

    def _connect(self, uri: str, timeout_s: float = 0.0) -> sqlite3.Connection:
        with self._explained():
            connection = sqlite3.connect(uri, uri=True, timeout=timeout_s, isolation_level=None)
        connection.row_factory = sqlite3.Row
        return connection

    def _uri(self) -> str:
        if self.path == MEMORY:
            return _MEMORY_URI
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if self.read_only else 'rwc'}"
        # Readers of a write-ahead log make a file beside it. Where they cannot, and nobody writes, there is no need.
        alone = not _allowed(self.path.parent) and not Path(f"{self.path}-wal").exists()
        return f"{uri}&immutable=1" if alone else uri

    def _open(self, schema: str, application_id: int, version: int) -> None:
        if self.read("SELECT 1 FROM sqlite_master LIMIT 1"):
            found = self._pragma("user_version")
            self._check(self._pragma("application_id") == application_id, "belongs to another program")
            self._check(found <= version, f"has schema {found}, of a newer mucudnn (this one knows {version}): upgrade")
        else:
            self._check(not self.read_only, "is empty")
            self._create(schema)

    def _migrate(self, migrations: Mapping[int, Sequence[str]], version: int) -> None:
        if self._pragma("user_version") == version:
            return
        if self.read_only:
            self._read_from_memory()
        with self._explained(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            for old in range(self._pragma("user_version"), version):  # another process may have done it meanwhile
                for statement in migrations[old]:
                    self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {version}")

    def _read_from_memory(self) -> None:
        file, self._connection = self._connection, self._connect(_MEMORY_URI)
        with self._explained():
            file.backup(self._connection)
        file.close()

    def _use_foreign_keys(self) -> None:
        """After migrating, which may make anew what other tables refer to."""
        with self._explained():
            self._connection.execute("PRAGMA foreign_keys = ON")
            if self._pragma("journal_mode") == "wal":  # safe against SIGKILL without waiting for the disk each time
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def _create(self, schema: str) -> None:
        # Some file systems cannot have a write-ahead log: SQLite's rollback journal serves as well, only slower.
        with suppress(sqlite3.OperationalError):
            self._connection.execute("PRAGMA journal_mode = WAL")
        with self._explained():
            self._connection.executescript(f"BEGIN IMMEDIATE; {schema} COMMIT;")

    def _check(self, condition: bool, fault: str) -> None:
        if not condition:
            raise DatabaseError(f"database {self.path} {fault}; {_MOVE_AWAY}")

    def _pragma(self, name: str) -> Any:
        return self.read(f"PRAGMA {name}")[0][0]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if not hasattr(error, "sqlite_errorcode"):
                raise  # not from the file: a mistake in mucudnn
            primary = error.sqlite_errorcode & 0xFF
            explanation = _EXPLANATIONS.get(primary, f"cannot be used ({error}); {_NAME_ANOTHER}")
            raise DatabaseError(f"database {self.path} {explanation}") from error


def _can_be_written(path: Path) -> bool:
    """Whether SQLite can write ``path`` and its journals beside it; makes the folder where it is missing."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    return _allowed(path.parent) and (not path.exists() or _allowed(path))


def _allowed(path: Path) -> bool:
    # Asked, not tried: closing a file that was opened to try would drop the locks of this process on it.
    return os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
