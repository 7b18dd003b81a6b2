"""Everything that was ever measured, in one SQLite file.

Rows are only added, each with its time stamp and committed at once; the newest row of a key counts, but none that was
measured on a busy machine where there is another. So nothing measured is lost, processes that share the file cannot
undo each other's work, and merging two files is the union of their rows. What other rows supersede stays until
``prune``.
"""

from __future__ import annotations

import csv
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TextIO, TypeVar, cast

from mucudnn.database import maintenance, queries, samples, schema
from mucudnn.database.contents import DatabaseInfo, EnvironmentRows, MergeCounts
from mucudnn.database.queries import StoredRow, every_row, latest_valid
from mucudnn.database.sqlite_file import MEMORY, SqliteFile, can_be_made, memory_of_thread
from mucudnn.running.environment import Environment
from mucudnn.words.errors import DATABASE_OPTION, DatabaseError, InvalidInputError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Failure, How, Measurement, MicroConfig, WholeRun
from mucudnn.words.warning import say_once, warn

P = ParamSpec("P")
T = TypeVar("T")

_NEVER = datetime.max.isoformat()  # later than every time stamp
_MEASURED = (*schema.COSTS, "load")
_RUN = (*schema.TIMES, "load")


def default_path() -> Path:
    """Return ``$MUCUDNN_DATABASE``, else ``mucudnn/measurements.sqlite`` in the user's cache folder."""
    if named := os.environ.get("MUCUDNN_DATABASE"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mucudnn" / "measurements.sqlite"


def _lacks_a_file() -> bool:
    """Whether nobody has named a file, and the default one cannot be made, which a warning says."""
    path = default_path()
    if os.environ.get("MUCUDNN_DATABASE") or can_be_made(path):
        return False
    say_once(
        f"database {path} cannot be made: what is measured is known to this process alone; name a file with "
        f"{DATABASE_OPTION} or MUCUDNN_DATABASE"
    )
    return True


def _told_of_damage(method: Callable[P, T]) -> Callable[P, T]:
    """Have a method that reads raise ``DatabaseError`` where it fails since the file is damaged."""

    @wraps(method)
    def checked(*args: P.args, **rest: P.kwargs) -> T:
        try:
            return method(*args, **rest)
        except (ValueError, TypeError, LookupError, ArithmeticError):
            cast(Database, args[0])._file.require_sound()
            raise

    return checked


class Database:
    """Measurements, failures and verifications, each under its environment, problem, and algorithms with versions.

    path: the file, made with its folder where missing; None: ``default_path()``, or a database in
    memory, kept by this thread, where that cannot be made, which a warning says; ``":memory:"``: kept in no file.
    read_only: never write. Files that cannot be written are opened so in any case: ask ``read_only``, and go on with
    ``copy_in_memory()`` where measurements are to be added all the same. create: whether a missing file is made.

    Use it as a context manager, and only in the thread that opened it, not in a process that was forked off meanwhile.
    Every method raises ``DatabaseError`` there, and where the file cannot be used: not SQLite, damaged, of another
    version, or locked by another process for longer than ``timeout_s``. Where the file is deleted or replaced
    meanwhile, what this object added goes into the one that is there then, or a new one, with a warning.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        read_only: bool = False,
        create: bool = True,
        timeout_s: float = 60.0,
    ) -> None:
        self._open = partial(
            SqliteFile,
            schema=schema.TABLES,
            application_id=schema.APPLICATION_ID,
            version=schema.VERSION,
            read_only=read_only,
            create=create,
            timeout_s=timeout_s,
        )
        self._is_kept = path is None and create and not read_only and _lacks_a_file()
        if self._is_kept:
            self._use(memory_of_thread(self._open))
        else:
            self._use(self._open(default_path() if path is None else Path(path)))
        self._first_added = _NEVER  # measured_at of the oldest row that this object added
        self._to_be_moved: list[dict[str, Any]] = []  # of a file that is no longer there

    def _use(self, file: SqliteFile) -> None:
        self._file = file

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
        self.close()

    def close(self) -> None:
        if self._first_added != _NEVER and self._file.has_moved():
            try:
                self._catch_up()
            except DatabaseError as error:
                warn(f"what was measured last is not stored: {error}", stacklevel=2)
        if not self._is_kept:
            self._file.close()

    def copy_in_memory(self) -> Database:
        """Return the same rows in a database that takes more, and forgets them when it is closed."""
        copy = Database(MEMORY)
        self._file.copy_to(copy._file)
        return copy

    def add(
        self, environment: Environment, problem: ConvProblem, algorithm_version: int, measurement: Measurement
    ) -> None:
        """Commit one measurement. Raises ``InvalidInputError`` for values that there cannot be, as do all that add."""
        values = {name: getattr(measurement, name) for name in _MEASURED} | samples.columns(measurement.raw)
        key = (environment, problem, algorithm_version, measurement.micro_config)
        self._add_measured("measurement", *key, **values)

    def add_failure(
        self, environment: Environment, problem: ConvProblem, algorithm_version: int, failure: Failure
    ) -> None:
        """Commit that a micro-config cannot be measured, with the reason."""
        key = (environment, problem, algorithm_version, failure.micro_config)
        self._add_measured(
            *("failure", *key),
            reason=failure.reason,
            passed_over=(2 if failure.by_arithmetic else 1) if failure.is_passed_over else None,
            needed_bytes=failure.needed_bytes,
        )

    def add_whole_run(
        self,
        environment: Environment,
        problem: ConvProblem,
        micro_configs: Sequence[MicroConfig],
        versions: Mapping[str, int],
        run: WholeRun,
        how: How = None,
    ) -> None:
        """Commit a whole run. versions: of at least the algorithms that ran. how: what was special in it."""
        key = schema.configuration_key(micro_configs, versions, how)
        values = {name: getattr(run, name) for name in _RUN} | samples.columns(run.raw)
        self._add("verification", environment, problem, configuration=key, **values)

    def add_confirmation(
        self,
        environment: Environment,
        fingerprint: str,
        versions: Mapping[str, int],
        findings: Mapping[str, Any],
        load: float | None = None,
    ) -> None:
        """Commit what steps of a model have shown.

        fingerprint: tells the model and what was chosen for it. versions: of the algorithms that it ran. findings:
        plain values.
        """
        parts = {"versions": json.dumps(dict(versions)), "findings": json.dumps(dict(findings))}
        self._add("confirmation", environment, None, fingerprint=fingerprint, load=load, **parts)

    @_told_of_damage
    def confirmation(self, environment: Environment, fingerprint: str) -> tuple[str, dict[str, Any]] | None:
        """Return when the one that counts was made, and its findings; ``None``: there is none."""
        return queries.confirmation(self._file, environment, fingerprint)

    @_told_of_damage
    def measurements(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Measurement, ...]:
        """Return the one of each micro-config that counts, sorted. versions: of the algorithms that are asked for."""
        newest = self._newest(environment, problem, versions)
        return tuple(Measurement(m, *(row[name] for name in _MEASURED)) for m, row in newest if _is_measured(row))

    @_told_of_damage
    def failures(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Failure, ...]:
        """Return micro-configs whose row that counts is a failure, sorted. versions: as for ``measurements``."""
        newest = self._newest(environment, problem, versions)
        return tuple(
            Failure(
                m,
                row["reason"],
                is_passed_over=row["passed_over"] is not None,
                by_arithmetic=row["passed_over"] == 2,
                needed_bytes=row["needed_bytes"],
            )
            for m, row in newest
            if not _is_measured(row)
        )

    @_told_of_damage
    def whole_run(
        self,
        environment: Environment,
        problem: ConvProblem,
        micro_configs: Sequence[MicroConfig],
        versions: Mapping[str, int],
        how: How = None,
    ) -> WholeRun | None:
        """Return the whole run of this very configuration that counts; None if there was none."""
        key = schema.configuration_key(micro_configs, versions, how)
        found: WholeRun | None = None
        for row in self._rows("verifications", environment, problem):
            if row["configuration"] == key and _counts(row, found):
                found = _whole_run(row)
        return found

    @_told_of_damage
    def whole_runs(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int], how: How = None
    ) -> dict[tuple[MicroConfig, ...], WholeRun]:
        """Return the whole run of each configuration that counts, of any batch size. Arguments as for ``whole_run``."""
        found: dict[tuple[MicroConfig, ...], WholeRun] = {}
        for row in self._rows("verifications", environment, problem):
            micro_configs = schema.micro_configs_from(row["configuration"], versions, how)
            if micro_configs is not None and _counts(row, found.get(micro_configs)):
                found[micro_configs] = _whole_run(row)
        return found

    @_told_of_damage
    def every_row(self) -> list[StoredRow]:
        """Return all rows, superseded ones included, oldest first."""
        return [*every_row(self._file)]

    @_told_of_damage
    def rows_that_count(
        self, environment: Environment, problems: Iterable[ConvProblem] | None = None
    ) -> list[StoredRow]:
        """Return the row of each key that counts, of measurements, failures and whole runs, oldest first.

        problems: those of these problems only.
        """
        condition = "TRUE" if problems is None else schema.of_owners(self._ids([environment]), self._ids(problems))
        here = schema.named(environment).items()
        rows = (row for row in every_row(self._file, condition) if here <= row.values.items())
        return latest_valid(row for row in rows if row.table != "confirmations")

    def doubtful_rows(self, environment: Environment) -> list[StoredRow]:
        """Return those of the rows that count that should be measured again."""
        return [row for row in self.rows_that_count(environment) if row.is_doubtful]

    @_told_of_damage
    def best_rate(self, environment: Environment) -> float:
        """Return the best rate of the known kernel that was seen there, in runs a second; 0 where none was."""
        find, values = schema.find(environment)
        rows = self._file.read(f"SELECT rate FROM rates WHERE environment_id = ({find})", values)
        return float(rows[0][0]) if rows else 0.0

    def add_rate(self, environment: Environment, rate: float) -> None:
        """Commit a rate of the known kernel, which replaces a lower one."""
        if rate <= self.best_rate(environment):
            return
        with self._writing() as connection:
            schema.insert(connection, "rates", (schema.identify(connection, environment), rate), replaces=True)

    @_told_of_damage
    def environments(self) -> tuple[Environment, ...]:
        """Return all environments that have rows, sorted."""
        rows = self._file.read(f"SELECT {schema.ENVIRONMENT} FROM environments WHERE {schema.HAS_ROWS}")
        return tuple(sorted(Environment(*row) for row in rows))

    @_told_of_damage
    def problems(self, environment: Environment) -> frozenset[ConvProblem]:
        """Return all problems that have measurements."""
        return queries.problems(self._file, environment)

    @_told_of_damage
    def versions(self, environment: Environment) -> dict[str, tuple[int, ...]]:
        """Return the versions of each algorithm that have measurements or failures: the last is the newest."""
        return queries.versions(self._file, environment)

    @_told_of_damage
    def measurements_of_all(
        self, environment: Environment, problems: Iterable[ConvProblem], versions: Mapping[str, int]
    ) -> dict[ConvProblem, tuple[Measurement, ...]]:
        """Return what ``measurements`` returns, for many problems in one query."""
        return queries.measurements(self._file, environment, problems, versions)

    @_told_of_damage
    def info(self) -> DatabaseInfo:
        """Return what is in the file, and how much. size_bytes: of the file alone, 0 in memory."""
        size_bytes = self.path.stat().st_size if self.path.exists() else 0
        rows = (
            EnvironmentRows(e, *maintenance.count(self._file, e), doubtful=len(self.doubtful_rows(e)))
            for e in self.environments()
        )
        return DatabaseInfo(self.path, size_bytes, schema.VERSION, tuple(rows))

    @_told_of_damage
    def export_csv(self, stream: TextIO) -> None:
        """Write all rows, oldest first, with a heading.

        ``kind``: measurement, failure, verification or confirmation.
        """
        writer = csv.writer(stream)  # lines end in CR LF, as RFC 4180 has it: then values with either are quoted
        writer.writerow(schema.EXPORT_COLUMNS)
        writer.writerows([_cell(row.get(column)) for column in schema.EXPORT_COLUMNS] for row in self._exported())

    @_told_of_damage
    def export_json_lines(self, stream: TextIO) -> None:
        """Write the rows of ``export_csv``, one JSON object a line, without the columns that a kind does not have."""
        for row in self._exported():
            stream.write(
                json.dumps({name: value for name, value in row.items() if value is not None}, allow_nan=False) + "\n"
            )

    def _exported(self) -> Iterator[dict[str, Any]]:
        for row in every_row(self._file):
            yield samples.for_export(row.values) | {"schema": schema.VERSION}

    def add_exported(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows as they were exported, with their time stamps: all of them or, on error, none.

        rows: by ``schema.ROW_COLUMNS``. Raises ``InvalidInputError`` for values that there cannot be.
        """
        with self._writing() as connection:
            queries.add_exported(connection, rows)

    @_told_of_damage
    def merge(self, other: Database | Path | str) -> MergeCounts:
        """Add the rows of another database, which is only read, that are not here: all of them or, on error, none."""
        source: Database
        with nullcontext(other) if isinstance(other, Database) else Database(other, read_only=True) as source:
            rows = (row.values for row in every_row(source._file))
            with self._writing() as connection:
                counts = queries.add_exported(connection, rows)
        return MergeCounts(**counts)

    def prune(
        self,
        *,
        environments: Sequence[Environment] | None = None,
        versions: Mapping[str, int] | None = None,
        failures: bool = False,
        dry_run: bool = False,
    ) -> int:
        """Remove the rows that newer ones supersede, and return how many rows (would) go.

        environments: one or more, if given: the rows of all others go as well. versions: if given, those of all other
        algorithms and versions go as well, but for engines. failures: they go as well, so that they are measured again.
        dry_run: remove nothing.
        """
        with self._writing() as connection:
            removed = maintenance.prune(connection, environments, versions, failures)
            if dry_run:
                connection.rollback()
        if removed and not dry_run:
            self._file.compact()
        return removed

    def _add_measured(
        self,
        kind: str,
        environment: Environment,
        problem: ConvProblem,
        version: int,
        micro_config: MicroConfig,
        **values: object,
    ) -> None:
        key = {"algorithm": micro_config.algorithm, "micro_batch_size": micro_config.micro_batch_size}
        self._add(kind, environment, problem, version=version, **key, **values)

    def _ids(self, keys: Iterable[Environment | ConvProblem]) -> list[int]:
        return [int(row[0]) for key in keys for row in self._file.read(*schema.find(key))]

    def _add(self, kind: str, environment: Environment, problem: ConvProblem | None, **values: object) -> None:
        owner = schema.named(environment) | ({} if problem is None else schema.named(problem))
        row = {"kind": kind, "measured_at": schema.now(), **owner, **values}
        try:
            self.commit(row)
        except InvalidInputError as error:
            raise InvalidInputError(f"this {kind} of {problem or 'a model'} cannot be stored: {error}") from None

    def commit(self, row: Mapping[str, Any]) -> None:
        """Commit a row, by ``schema.ROW_COLUMNS``; one of its key and time stamp is replaced."""
        with self._writing() as connection:
            queries.add_exported(connection, [row], replaces=True)
        self._first_added = min(self._first_added, row["measured_at"])

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction in the file that is at the path now, whatever became of the one that was opened."""
        self._catch_up()
        with self._file.writing() as connection:
            yield connection

    def _catch_up(self) -> None:
        """Go over to the file that is at the path now, if it is another, with what this object added."""
        if self._file.has_moved():
            self._follow()
        if self._to_be_moved:
            with self._file.writing() as connection:
                queries.add_exported(connection, self._to_be_moved)
            self._to_be_moved = []

    def _follow(self) -> None:
        """Use the file that is at the path now, or a new one; what this object added must be moved there."""
        self._file.require_content()
        place, copy = self._file.place, self.copy_in_memory()
        what = "replaced" if place.exists() else "deleted"
        self._to_be_moved += [
            row.values for row in every_row(copy._file) if row.values["measured_at"] >= self._first_added
        ]
        self._file.leave()
        try:
            self._use(self._open(place))
        except DatabaseError:
            copy._file.path, copy._file.read_only = place, True
            self._use(copy._file)  # what was read stays readable
            raise
        copy.close()
        warn(
            f"database {place} was {what} while it was in use: what was measured since then goes into the file that is "
            "there now",
            stacklevel=5,
        )

    def _newest(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> list[tuple[MicroConfig, sqlite3.Row]]:
        newest: dict[MicroConfig, sqlite3.Row] = {}
        for row in self._rows("measurements", environment, problem):
            micro_config = MicroConfig(row["algorithm"], row["micro_batch_size"])
            before = newest.get(micro_config)
            is_newer = before is None or queries.counts(row["load"], before["load"])
            if versions.get(row["algorithm"]) == row["version"] and is_newer:
                newest[micro_config] = row
        return sorted(newest.items())

    def _rows(self, table: str, environment: Environment, problem: ConvProblem) -> list[sqlite3.Row]:
        """Return all rows of a key, oldest first."""
        environment_id, environment_values = schema.find(environment)
        problem_id, problem_values = schema.find(problem)
        return self._file.read(
            f"SELECT * FROM {table} WHERE environment_id = ({environment_id}) AND problem_id = ({problem_id}) "
            "ORDER BY measured_at",
            environment_values + problem_values,
        )


def _cell(value: object) -> object:
    """Return what a cell of a table holds: of samples their list in JSON."""
    return json.dumps(value) if isinstance(value, list) else value


def _whole_run(row: sqlite3.Row) -> WholeRun:
    return WholeRun(*(row[name] for name in _RUN))


def _counts(row: sqlite3.Row, before: WholeRun | None) -> bool:
    """Whether it counts instead of an older run."""
    return before is None or queries.counts(row["load"], before.load)


def _is_measured(row: sqlite3.Row) -> bool:
    return row["reason"] is None
