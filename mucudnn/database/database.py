"""Everything that was ever measured, in one SQLite file.

Rows are only added, each with its time stamp and committed at once; the newest row of a key counts, but none that was
measured on a busy machine where there is another, and none of an older way of measuring (``results.METHOD``) where
anything of its problem was measured in a newer one. So nothing measured is lost, processes that share the file cannot
undo each other's work, and merging two files is the union of their rows. What other rows supersede stays until
``prune``. Only "run started" rows are deleted: see ``EnvironmentStore``.
"""

from __future__ import annotations

import csv
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from mucudnn.database import maintenance, migrations, queries, samples, schema
from mucudnn.database.bad_rows import SoundRows, StoredRow, every_row
from mucudnn.database.column_rules import is_rate, row_faults
from mucudnn.database.contents import DatabaseInfo, EnvironmentRows, MergeCounts
from mucudnn.database.sqlite_file import MEMORY, SqliteFile, can_be_made, memory_of_thread
from mucudnn.running.environment import Environment
from mucudnn.words.errors import DATABASE_OPTION, DatabaseError, InvalidInputError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import METHOD, Failure, How, Measurement, MicroConfig, WholeRun, of_one_way
from mucudnn.words.warning import say_once, warn

_NEVER = datetime.max.isoformat()  # later than every time stamp
_MEASURED = (*schema.COSTS, *schema.CIRCUMSTANCES)
_RUN = (*schema.TIMES, *schema.CIRCUMSTANCES)


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


class Database:
    """Measurements, failures and verifications, each under its environment, problem, and algorithms with versions.

    path: the file, made with its folder where missing; None: ``default_path()``, or a database in
    memory, kept by this thread, where that cannot be made, which a warning says; ``":memory:"``: kept in no file.
    read_only: never write. Files that cannot be written are opened so in any case: ask ``read_only``, and go on with
    ``copy_in_memory()`` where measurements are to be added all the same. create: whether a missing file is made.

    Use it as a context manager, and only in the thread that opened it, not in a process that was forked off meanwhile.
    Every method raises ``DatabaseError`` there, and where the file cannot be used: not SQLite, damaged, newer, or
    locked by another process for longer than ``timeout_s``. Bad rows, with values that there cannot be, are passed over
    as if nothing had been measured, with one warning for all. Where the file is deleted or replaced meanwhile, what
    this object added goes into the one that is there then, or a new one, with a warning.
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
            version=migrations.VERSION,
            migrations=migrations.MIGRATIONS,
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
        self._file, self._sound = file, SoundRows(file)

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
            passed_over=1 if failure.is_passed_over else None,
            needed_bytes=failure.needed_bytes,
            method=METHOD,
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
        plain values, as ``column_rules`` has them.
        """
        parts = {"versions": json.dumps(dict(versions)), "findings": json.dumps(dict(findings))}
        self._add("confirmation", environment, None, fingerprint=fingerprint, load=load, method=METHOD, **parts)

    def confirmation(self, environment: Environment, fingerprint: str) -> tuple[str, dict[str, Any]] | None:
        """Return when the one that counts was made, and its findings; ``None``: there is none."""
        return queries.confirmation(self._sound, environment, fingerprint)

    def measurements(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Measurement, ...]:
        """Return the one of each micro-config that counts, sorted, all measured in one way.

        versions: of the algorithms that are asked for.
        """
        newest = self._newest(environment, problem, versions)
        return of_one_way(
            [Measurement(m, *(row[name] for name in _MEASURED)) for m, row in newest if _is_measured(row)]
        )

    def failures(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Failure, ...]:
        """Return micro-configs whose row that counts is a failure, sorted. versions: as for ``measurements``."""
        newest = self._newest(environment, problem, versions)
        return tuple(
            Failure(m, row["reason"], is_passed_over=row["passed_over"] is not None, needed_bytes=row["needed_bytes"])
            for m, row in newest
            if not _is_measured(row)
        )

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
        for row in self._rows_of_whole_runs(environment, problem):
            if row["configuration"] == key and _counts(row, found):
                found = _whole_run(row)
        return found

    def whole_runs(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int], how: How = None
    ) -> dict[tuple[MicroConfig, ...], WholeRun]:
        """Return the whole run of each configuration that counts, of any batch size. Arguments as for ``whole_run``."""
        found: dict[tuple[MicroConfig, ...], WholeRun] = {}
        for row in self._rows_of_whole_runs(environment, problem):
            micro_configs = schema.micro_configs_from(row["configuration"], versions, how)
            if micro_configs is not None and _counts(row, found.get(micro_configs)):
                found[micro_configs] = _whole_run(row)
        return found

    def sound_rows(self) -> list[StoredRow]:
        """Return all rows without faults, superseded ones included, oldest first."""
        self._sound.tell()
        return [row for row in every_row(self._file) if not row.faults]

    def rows_that_count(
        self, environment: Environment, problems: Iterable[ConvProblem] | None = None
    ) -> list[StoredRow]:
        """Return the sound row of each key that counts, of measurements, failures and whole runs, oldest first.

        problems: those of these problems only.
        """
        condition = "TRUE" if problems is None else schema.of_owners(self._ids([environment]), self._ids(problems))
        here = schema.named(environment).items()
        rows = (row for row in every_row(self._file, condition) if here <= row.values.items())
        return maintenance.that_count(row for row in rows if row.table != "confirmations")

    def doubtful_rows(self, environment: Environment) -> list[StoredRow]:
        """Return those of the rows that count that should be measured again."""
        return [row for row in self.rows_that_count(environment) if row.is_doubtful]

    def best_rate(self, environment: Environment) -> float:
        """Return the best rate of the known kernel that was seen there, in runs a second; 0 where none was."""
        find, values = schema.find(environment)
        rows = self._file.read(f"SELECT rate FROM rates WHERE environment_id = ({find})", values)
        return float(rows[0][0]) if rows and is_rate(rows[0][0]) else 0.0

    def add_rate(self, environment: Environment, rate: float) -> None:
        """Commit a rate of the known kernel, which replaces a lower one."""
        if rate <= self.best_rate(environment):
            return
        with self._writing() as connection:
            schema.insert(connection, "rates", (schema.identify(connection, environment), rate), otherwise="REPLACE")

    def environments(self) -> tuple[Environment, ...]:
        """Return all environments that have rows, sorted."""
        rows = self._sound.read(f"SELECT {schema.ENVIRONMENT} FROM environments WHERE {schema.HAS_ROWS}")
        return tuple(sorted(Environment(*row) for row in rows))

    def problems(self, environment: Environment) -> frozenset[ConvProblem]:
        """Return all problems that have measurements and that this version of mucudnn knows."""
        return queries.problems(self._sound, environment)

    def versions(self, environment: Environment) -> dict[str, tuple[int, ...]]:
        """Return the versions of each algorithm that have measurements or failures: the last is the newest."""
        return queries.versions(self._sound, environment)

    def measurements_of_all(
        self, environment: Environment, problems: Iterable[ConvProblem], versions: Mapping[str, int]
    ) -> dict[ConvProblem, tuple[Measurement, ...]]:
        """Return what ``measurements`` returns, for many problems in one query."""
        return queries.measurements(self._sound, environment, problems, versions)

    def info(self) -> DatabaseInfo:
        """Return what is in the file, and how much, bad rows included. size_bytes: of the file alone, 0 in memory."""
        self._sound.tell()
        size_bytes = self.path.stat().st_size if self.path.exists() else 0
        rows = (
            EnvironmentRows(e, *maintenance.count(self._file, e), doubtful=len(self.doubtful_rows(e)))
            for e in self.environments()
        )
        return DatabaseInfo(self.path, size_bytes, migrations.VERSION, tuple(rows))

    def bad_rows(self) -> list[StoredRow]:
        """Return the rows that are never used, and that ``prune`` removes."""
        return self._sound.bad_rows()

    def export_csv(self, stream: TextIO) -> None:
        """Write all rows but bad ones, oldest first, with a heading.

        ``kind``: measurement, failure, verification or confirmation.
        """
        writer = csv.writer(stream)  # lines end in CR LF, as RFC 4180 has it: then values with either are quoted
        writer.writerow(schema.EXPORT_COLUMNS)
        writer.writerows([_cell(row.get(column)) for column in schema.EXPORT_COLUMNS] for row in self._exported())

    def export_json_lines(self, stream: TextIO) -> None:
        """Write the rows of ``export_csv``, one JSON object a line, without the columns that a kind does not have."""
        for row in self._exported():
            stream.write(
                json.dumps({name: value for name, value in row.items() if value is not None}, allow_nan=False) + "\n"
            )

    def _exported(self) -> Iterator[dict[str, Any]]:
        for row in every_row(self._file):
            if row.is_bad:
                self._sound.tell()
            else:
                yield samples.for_export(row.values) | {"schema": migrations.VERSION}

    def add_exported(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows as they were exported, with their time stamps: all of them or, on error, none.

        rows: by ``schema.ROW_COLUMNS``, without faults (see ``database.column_rules``).
        """
        with self._writing() as connection:
            queries.add_exported(connection, rows)

    def merge(self, other: Database | Path | str) -> MergeCounts:
        """Add the rows of another database, which is only read, that are not here: all of them or, on error, none."""
        with nullcontext(other) if isinstance(other, Database) else Database(other, read_only=True) as source:
            with self._writing() as connection:
                counts = maintenance.merge(connection, every_row(source._file))
            if counts["bad"]:
                source._sound.tell()
        return MergeCounts(**counts)

    def prune(
        self,
        *,
        environments: Sequence[Environment] | None = None,
        versions: Mapping[str, int] | None = None,
        failures: bool = False,
        dry_run: bool = False,
    ) -> int:
        """Remove bad rows and those that newer ones supersede, and return how many rows (would) go.

        environments: one or more, if given: the rows of all others go as well. versions: if given, those of all other
        algorithms and versions go as well, but for engines. failures: they go as well, so that they are measured again.
        dry_run: remove nothing.
        """
        with self._writing() as connection:
            removed = maintenance.prune(self._file, connection, environments, versions, failures)
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
        if faults := row_faults(row):
            what = f"this {kind} of {problem or 'a model'}"
            raise InvalidInputError(f"{what} cannot be stored: {'; '.join(faults)}")
        self.commit(row)

    def commit(self, row: Mapping[str, Any]) -> None:
        """Commit a row without faults, by ``schema.ROW_COLUMNS``; one of its key and time stamp is replaced."""
        with self._writing() as connection:
            queries.add_exported(connection, [row], otherwise="REPLACE")
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
            row.values
            for row in every_row(copy._file)
            if not row.faults and row.values["measured_at"] >= self._first_added
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
            is_newer = before is None or _rank(row) >= _rank(before)
            if versions.get(row["algorithm"]) == row["version"] and is_newer:
                newest[micro_config] = row
        return sorted(newest.items())

    def _rows_of_whole_runs(self, environment: Environment, problem: ConvProblem) -> list[sqlite3.Row]:
        """Return those of the newest way in which the problem was measured or run whole, oldest first."""
        rows = self._rows("verifications", environment, problem)
        measured = queries.newest_method(self._sound, environment, problem)
        newest = max((row["method"] for row in rows), default=0)
        return [row for row in rows if row["method"] == max(measured, newest)]

    def _rows(self, table: str, environment: Environment, problem: ConvProblem) -> list[sqlite3.Row]:
        """Return all rows of a key, oldest first."""
        environment_id, environment_values = schema.find(environment)
        problem_id, problem_values = schema.find(problem)
        return self._sound.read(
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
    return before is None or _rank(row) >= schema.rank(before.load, before.method)


def _rank(row: sqlite3.Row) -> tuple[int, bool]:
    return schema.rank(*(row[name] for name in schema.CIRCUMSTANCES))


def _is_measured(row: sqlite3.Row) -> bool:
    return row["reason"] is None
