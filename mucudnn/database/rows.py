"""The rows of one database file: adding, merging, counting and pruning.

The file is append-only; each row is committed at once with its time stamp. The valid row of a key is the newest row
measured on a quiet machine, or else the newest row. So no measurement is lost, processes that share the file cannot
undo each other's work, and merging two files is the union of their rows. Superseded rows stay until ``prune``.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

from mucudnn.database import schema
from mucudnn.database.schema import Row
from mucudnn.database.sqlite_file import MEMORY, SqliteFile, can_be_made
from mucudnn.running.environment import Environment
from mucudnn.words.errors import DATABASE_OPTION
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import is_doubtful
from mucudnn.words.warning import say_once


class EnvironmentRows(NamedTuple):
    """Numbers of rows of one environment, including superseded ones.

    A row is superseded if a newer or quieter row replaces it. doubtful: number of valid measurements and whole runs
    that should be repeated, since they were noisy or the machine was busy.
    """

    environment: Environment
    measurements: int
    failures: int
    verifications: int
    confirmations: int
    doubtful: int


class MergeCounts(NamedTuple):
    """Numbers of rows that a merge added, and of rows that were already present."""

    added: int
    known: int


def default_path() -> Path:
    """Return the path in ``$MUCUDNN_DATABASE``, or else ``mucudnn/measurements-N.sqlite`` in the user's cache folder.

    N is the schema version, so that each version has its own default file.
    """
    if named := os.environ.get("MUCUDNN_DATABASE"):
        return Path(named).expanduser()
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "mucudnn" / f"measurements-{schema.VERSION}.sqlite"


_kept = threading.local()  # the in-memory database used if no file can be created, and the process that opened it


def _in_memory_of_thread(open_file: Callable[[Path], SqliteFile]) -> SqliteFile:
    """Return this thread's in-memory database, opened at the first call, and warn once that rows will be lost."""
    say_once(
        f"database {default_path()} cannot be created: measurements are lost when this process ends; name a file with "
        f"{DATABASE_OPTION} or MUCUDNN_DATABASE"
    )
    if getattr(_kept, "process", None) != os.getpid():
        _kept.process, _kept.file = os.getpid(), open_file(MEMORY)
    return cast(SqliteFile, _kept.file)


def is_doubtful_row(row: Row) -> bool:
    """Whether the result in a row should be measured again: it was noisy, or the machine was busy."""
    return row["kind"] != "failure" and is_doubtful(row["noise"], row["load"])


class StoredRows:
    """The rows of a file, each a dict with the keys ``schema.ROW_COLUMNS``.

    path: the file, created with its folder if missing; None for ``default_path()``, or, with a warning, for this
    thread's in-memory database if that file cannot be created; ``":memory:"`` for a new in-memory database. read_only:
    never write. A file that cannot be written is always opened read-only: check ``read_only``, and use
    ``copy_in_memory()`` to add measurements anyway. create: whether to create a missing file.

    Use the object as a context manager, which turns errors caused by a damaged file into ``DatabaseError``, and only in
    the thread and process that opened it. Every method raises ``DatabaseError`` in another thread or a forked process,
    and if the file is not SQLite, is damaged, has another version, or is locked by another process for longer than
    ``timeout_s``. Once the file is deleted, replaced or emptied, adding rows raises ``DatabaseError``; earlier rows are
    in the old file.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        read_only: bool = False,
        create: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        open_file = partial(SqliteFile, read_only=read_only, create=create, timeout_s=timeout_s)
        may_keep = path is None and create and not read_only and not os.environ.get("MUCUDNN_DATABASE")
        self._is_kept = may_keep and not can_be_made(default_path())
        if self._is_kept:
            self._file = _in_memory_of_thread(open_file)
        else:
            self._file = open_file(default_path() if path is None else Path(path))

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def read_only(self) -> bool:
        return self._file.read_only

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, (ValueError, TypeError, LookupError, ArithmeticError, struct.error)):
                self._file.require_sound()
        finally:
            self.close()

    def close(self) -> None:
        if not self._is_kept:
            self._file.close()

    def add_exported(self, rows: Iterable[Mapping[str, Any]]) -> MergeCounts:
        """Add missing exported rows with their time stamps: all of them or, on error, none. Return the numbers of rows.

        rows: values by column, as in ``schema.ROW_COLUMNS``. Raises ``InvalidInputError`` for invalid values.
        """
        with self._file.writing() as connection:
            return MergeCounts(**schema.add_rows(connection, rows))

    def merge(self, other: StoredRows | Path | str) -> MergeCounts:
        """Add the missing rows of another database: all of them or, on error, none.

        The other database is only read. Returns the numbers of rows added and of rows already present.
        """
        source: StoredRows
        with nullcontext(other) if isinstance(other, StoredRows) else StoredRows(other, read_only=True) as source:
            return self.add_exported(source.every_row())

    def commit(self, row: Row) -> None:
        """Commit a row, replacing a row with the same key and time stamp."""
        with self._file.writing() as connection:
            schema.add_rows(connection, [row], replaces=True)

    def every_row(self) -> list[Row]:
        """Return all rows, including superseded ones, oldest first."""
        return self._rows(schema.select_rows())

    def rows_that_count(
        self, environment: Environment | None = None, problems: Iterable[ConvProblem] | None = None
    ) -> list[Row]:
        """Return the valid rows (not superseded by newer or quieter ones) of measurements, failures and whole runs.

        The oldest row comes first.

        environment, problems: if given, return only rows of this environment or of these problems.
        """
        tables = ("measurements", "verifications")
        return self._rows(schema.select_rows(tables, self._of(environment, problems), counting=True))

    def doubtful_rows(self, environment: Environment) -> list[Row]:
        """Return the valid rows whose results should be measured again: noisy, or measured on a busy machine."""
        return [row for row in self.rows_that_count(environment) if is_doubtful_row(row)]

    def environments(self) -> tuple[Environment, ...]:
        """Return all environments (machines with their software) that have rows, sorted."""
        with_rows = " UNION ".join(f"SELECT environment_id FROM {table}" for table in schema.KEYS)
        columns = ", ".join(schema.ENVIRONMENT_COLUMNS)
        rows = self._file.read(f"SELECT {columns} FROM environments WHERE id IN ({with_rows})")
        return tuple(sorted(Environment(*row) for row in rows))

    def info(self) -> tuple[EnvironmentRows, ...]:
        """Return the numbers of rows of each environment (machine and software)."""
        return tuple(map(self._info, self.environments()))

    def _info(self, environment: Environment) -> EnvironmentRows:
        found = {str(kind): int(count) for kind, count in self._file.read(schema.count_rows(self._of(environment)))}
        return EnvironmentRows(
            environment,
            measurements=found.get("measurement", 0),
            failures=found.get("failure", 0),
            verifications=found.get("verification", 0),
            confirmations=found.get("confirmation", 0),
            doubtful=len(self.doubtful_rows(environment)),
        )

    def prune(
        self,
        *,
        environments: Sequence[Environment] | None = None,
        versions: Mapping[str, int] | None = None,
        failures: bool = False,
        dry_run: bool = False,
    ) -> int:
        """Remove superseded rows (replaced by newer or quieter ones), and return the number of removed rows.

        environments: if given, remove rows of all other environments too. versions: if given, remove rows of all other
        algorithms and versions too, except algorithms of libraries. failures: remove failures too, so that they are
        measured again. dry_run: remove nothing, only count.
        """
        with self._file.writing() as connection:
            ids = None if environments is None else self._ids(environments)
            removed = _prune(connection, ids, versions, failures)
            if dry_run:
                connection.rollback()
        if removed and not dry_run:
            self._file.compact()
        return removed

    def _counting(
        self, table: str, condition: str, parameters: Sequence[Any] = (), columns: str = "*"
    ) -> list[sqlite3.Row]:
        return self._file.read(schema.latest_valid(table, condition, columns), parameters)

    def _rows(self, sql: str) -> list[Row]:
        return [dict(zip(schema.ROW_COLUMNS, row, strict=True)) for row in self._file.read(sql)]

    def _of(self, environment: Environment | None = None, problems: Iterable[ConvProblem] | None = None) -> str:
        """Return the SQL condition that selects rows of an environment and of some problems; None selects all."""
        wanted = {"environment_id": None if environment is None else [environment], "problem_id": problems}
        ids = {name: ", ".join(map(str, self._ids(keys))) for name, keys in wanted.items() if keys is not None}
        return " AND ".join(["TRUE", *(f"{name} IN ({listed})" for name, listed in ids.items())])

    def _ids(self, keys: Iterable[Environment | ConvProblem]) -> list[int]:
        return [int(row[0]) for key in keys for row in self._file.read(*schema.find(key))]


def _is_other(versions: Mapping[str, int], algorithm: str, version: int) -> bool:
    """Whether an algorithm is unknown or has another version. versions: versions of the known algorithms.

    False for algorithms of a library (``source:67 k2=5``), whose version is part of the environment, and for algorithms
    of a package that is not installed (``own/pointwise``).
    """
    if ":" in algorithm or ("/" in algorithm and algorithm not in versions):
        return False
    return versions.get(algorithm) != version


# SQL conditions for rows with an algorithm of another version
_PART = "EXISTS (SELECT 1 FROM json_each({0}) AS part WHERE is_other({1}, {2}))"
_OTHER_VERSIONS = {
    "measurements": "is_other(algorithm, version)",
    "verifications": _PART.format(
        *("configuration", "json_extract(part.value, '$[0]')", "json_extract(part.value, '$[1]')")
    ),
    "confirmations": _PART.format("findings, '$.versions'", "part.key", "part.value"),
}


def _prune(
    connection: sqlite3.Connection,
    environment_ids: Iterable[int] | None,
    versions: Mapping[str, int] | None,
    failures: bool,
) -> int:
    """Delete superseded rows and, if given, other environments, versions and failures. Return the number of rows."""
    conditions = []
    if environment_ids is not None:
        listed = ", ".join(map(str, environment_ids))
        conditions += [(table, f"environment_id NOT IN ({listed})") for table in schema.KEYS]
    if versions is not None:
        connection.create_function("is_other", 2, partial(_is_other, versions))
        conditions += _OTHER_VERSIONS.items()
    conditions += [(table, schema.superseded(table)) for table in schema.KEYS]
    if failures:  # last, or else an older measurement would become valid
        conditions.append(("measurements", "reason IS NOT NULL"))
    removed = sum(
        connection.execute(f"DELETE FROM {table} WHERE {condition}").rowcount for table, condition in conditions
    )
    for owner in ("environment_id", "problem_id"):
        used = " UNION ".join(f"SELECT {owner} FROM {table}" for table, key in schema.KEYS.items() if owner in key)
        if owner == "environment_id":
            connection.execute(f"DELETE FROM rates WHERE environment_id NOT IN ({used})")
        connection.execute(f"DELETE FROM {owner.removesuffix('_id')}s WHERE id NOT IN ({used})")
    return removed
