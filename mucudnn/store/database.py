"""The database of measurements: one SQLite file, whose rows are committed one by one with their time stamps.

Among rows with the same key the newest one measured on a quiet machine counts, or else the newest one. So merging two
files is the union of their rows, and processes that share a file cannot undo each other's work.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from mucudnn.core.errors import DATABASE_OPTION, InvalidInputError, say_once
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Comparison, Environment, Failure, FailureKind, Measurement, MicroConfig
from mucudnn.core.values import grouped
from mucudnn.store import schema
from mucudnn.store.schema import Row, configuration_key, micro_configs_from, packed, seconds_from
from mucudnn.store.sqlite_file import MEMORY, SqliteFile, can_be_opened, make_folder

_MEASURED = (*schema.COSTS, "load")
_RESULT = ("reason", "passed_over", "needed_bytes", "least_s", *_MEASURED)
_RUN = (*schema.TIMES, "load")


def now() -> str:
    """Return the current time as text that sorts by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class EnvironmentRows(NamedTuple):
    """Numbers of rows of one environment.

    busy: number of rows that were measured under load.
    """

    environment: Environment
    measurements: int
    failures: int
    verifications: int
    timings: int
    busy: int


def default_path() -> Path:
    """Return the path in ``$MUCUDNN_DATABASE``, or else ``mucudnn/measurements-N.sqlite`` in the user's cache folder.

    N is the schema version, so that files of other versions are left alone.
    """
    if named := os.environ.get("MUCUDNN_DATABASE"):
        return Path(named).expanduser()
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "mucudnn" / f"measurements-{schema.VERSION}.sqlite"


_kept = threading.local()  # the in-memory database used if no file can be created, and the process that opened it


class Database:
    """Measurements, failures and verifications, by environment, problem and versions of algorithms.

    path: the file, created with its folder if missing; None for ``default_path()``, or, with a warning, for this
    thread's in-memory database if that file cannot be created; ``":memory:"`` for a new in-memory database.
    read_only: whether never to write. A file that cannot be written is always opened read-only: check ``read_only``,
    and use ``copy_in_memory()`` to add measurements anyway.
    create: whether to create a missing file.
    timeout_s: longest wait for other processes that lock the file.

    Use the object as a context manager, which turns errors caused by a damaged file into ``DatabaseError``, and only in
    the thread and process that opened it. Every method raises ``DatabaseError`` in another thread or a forked process,
    and if the file is not SQLite, is damaged, has another version, or stays locked. Once the file is deleted, replaced
    or emptied, adding rows raises ``DatabaseError``; earlier rows are in the old file. Methods that add rows raise
    ``InvalidInputError`` for invalid values.
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
        if may_keep:
            make_folder(default_path())
        self._is_kept = may_keep and not can_be_opened(default_path())
        if self._is_kept:
            say_once(
                f"database {default_path()} cannot be created: measurements are lost when this process ends; name a "
                f"file with {DATABASE_OPTION} or MUCUDNN_DATABASE"
            )
            if getattr(_kept, "process", None) != os.getpid():
                _kept.process, _kept.file = os.getpid(), open_file(MEMORY)
            self._file: SqliteFile = _kept.file
        else:
            self._file = open_file(default_path() if path is None else Path(path))
        self.path, self.read_only = self._file.path, self._file.read_only

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

    def copy_in_memory(self) -> Database:
        """Return a writable in-memory copy of all rows, which is lost when the returned database is closed."""
        copy = Database(MEMORY)
        self._file.copy_to(copy._file)
        return copy

    # Adding

    def add(
        self, environment: Environment, problem: ConvProblem, algorithm_version: int, measurement: Measurement
    ) -> None:
        """Commit one measurement."""
        micro_config = _columns_of(measurement.micro_config, algorithm_version)
        values = _columns(measurement, _MEASURED, schema.SAMPLES["measurement"])
        self._add("measurement", environment, problem, micro_config | values)

    def add_failure(
        self, environment: Environment, problem: ConvProblem, algorithm_version: int, failure: Failure
    ) -> None:
        """Commit the failure to measure a micro-config (an algorithm and a micro-batch size), with its reason."""
        values = {
            "reason": failure.reason,
            "passed_over": 2 if failure.kind is FailureKind.TOO_MANY_FLOPS else 1 if failure.is_passed_over else None,
            "needed_bytes": failure.needed_bytes,
            "least_s": failure.least_s,
        }
        self._add("failure", environment, problem, _columns_of(failure.micro_config, algorithm_version) | values)

    def add_whole_run(
        self,
        environment: Environment,
        problem: ConvProblem,
        micro_configs: Sequence[MicroConfig],
        versions: Mapping[str, int],
        run: Comparison,
        *,
        fresh: bool = False,
    ) -> None:
        """Commit a whole run: the times of complete calls of a configuration.

        versions: versions of at least the algorithms that ran.
        fresh: whether each call allocated its workspace.
        """
        key = configuration_key(micro_configs, versions, fresh=fresh)
        values = _columns(run, _RUN, schema.SAMPLES["verification"])
        self._add("verification", environment, problem, {"configuration": key} | values)

    def add_timing(
        self, environment: Environment, subject: str, seconds: Sequence[Sequence[float]], load: float | None
    ) -> None:
        """Commit what was timed together.

        subject: a text that says what was timed.
        seconds: samples of each call.
        load: load of the machine.
        """
        values = {"subject": subject, "seconds": json.dumps(seconds), "load": load}
        self.commit({"kind": "timing", "measured_at": now(), **schema.named(environment), **values})

    def _add(self, kind: str, environment: Environment, problem: ConvProblem, values: Row) -> None:
        row = {"kind": kind, "measured_at": now()} | schema.named(environment) | schema.named(problem) | values
        try:
            self.commit(row)
        except InvalidInputError as error:
            raise InvalidInputError(f"this {kind} of {problem} cannot be stored: {error}") from None

    def commit(self, row: Row) -> None:
        """Commit a row, replacing those that it supersedes."""
        with self._file.writing() as connection:
            schema.add_rows(connection, [row], replaces=True)

    def add_exported(self, rows: Iterable[Mapping[str, Any]]) -> Counter[str]:
        """Add missing exported rows with their time stamps: all of them or, on error, none.

        Return the numbers of ``added`` rows, and of rows that were already ``known``.

        rows: values by column, as in ``schema.ROW_COLUMNS``.
        """
        with self._file.writing() as connection:
            return schema.add_rows(connection, rows)

    def merge(self, other: Database) -> Counter[str]:
        """Add the missing rows of another database, which is only read, as ``add_exported`` does."""
        return self.add_exported(other.every_row())

    # Reading

    def every_row(
        self, environment: Environment | None = None, problems: Iterable[ConvProblem] | None = None
    ) -> list[Row]:
        """Return all rows, oldest first, each a dict with the keys ``schema.ROW_COLUMNS``.

        environment: the only environment of which to return rows; None for all.
        problems: the only problems of which to return rows; None for all.
        """
        tables = [table for table, key in schema.KEYS.items() if problems is None or "problem_id" in key]
        rows = self._file.read(schema.select_rows(self._of(environment, problems), tables))
        return [dict(zip(schema.ROW_COLUMNS, row, strict=True)) for row in rows]

    def measurements(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Measurement, ...]:
        """Return the measurement of each micro-config (algorithm and micro-batch size), sorted.

        versions: versions of the algorithms to return.
        """
        return self.measurements_of_all(environment, [problem], versions)[problem]

    def measurements_of_all(
        self, environment: Environment, problems: Iterable[ConvProblem], versions: Mapping[str, int]
    ) -> dict[ConvProblem, tuple[Measurement, ...]]:
        """Return the measurements of many problems by problem, in one query."""
        return {
            problem: tuple(Measurement(m, *costs) for m, (reason, _, _, _, *costs) in results if reason is None)
            for problem, results in self._results(environment, problems, versions).items()
        }

    def failures(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Failure, ...]:
        """Return the failures of the algorithms in these versions, sorted."""
        results = self._results(environment, [problem], versions)[problem]
        return tuple(
            Failure(m, reason, _kind(passed_over, needed, least_s), needed, least_s)
            for m, (reason, passed_over, needed, least_s, *_) in results
            if reason is not None
        )

    def whole_run(
        self,
        environment: Environment,
        problem: ConvProblem,
        micro_configs: Sequence[MicroConfig],
        versions: Mapping[str, int],
        *,
        fresh: bool = False,
    ) -> Comparison | None:
        """Return the whole run (times of complete calls) of exactly this configuration; None if there is none."""
        return self.whole_runs(environment, problem, versions, fresh=fresh).get(tuple(micro_configs))

    def whole_runs(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int], *, fresh: bool = False
    ) -> dict[tuple[MicroConfig, ...], Comparison]:
        """Return the whole run (times of complete calls) of each configuration, of any batch size.

        Arguments are as for ``whole_run``.
        """
        runs = {}
        for row in self._file.read(schema.select("verifications", self._of(environment, [problem]))):
            micro_configs = micro_configs_from(row["configuration"], versions, fresh=fresh)
            if micro_configs is not None:
                runs[micro_configs] = Comparison(*(row[name] for name in _RUN))
        return runs

    def timing(self, environment: Environment, subject: str) -> tuple[list[list[float]], float | None] | None:
        """Return the samples of each call that was timed for a subject, in seconds, and the machine's load; or None."""
        rows = self._file.read(schema.select("timings", f"{self._of(environment)} AND subject = ?"), [subject])
        with suppress(InvalidInputError):
            return (seconds_from(rows[-1]["seconds"]), rows[-1]["load"]) if rows else None
        return None

    def timings(self, environment: Environment, beginning: str) -> list[tuple[str, list[list[float]]]]:
        """Return the subjects that begin with a text, and the samples of each call that was timed for them."""
        condition = f"{self._of(environment)} AND substr(subject, 1, {len(beginning)}) = ?"
        rows = self._file.read(schema.select("timings", condition), [beginning])
        timings = []
        for row in rows:
            with suppress(InvalidInputError):
                timings.append((row["subject"], seconds_from(row["seconds"])))
        return timings

    def problems(self, environment: Environment) -> frozenset[ConvProblem]:
        """Return all problems with measurements in this environment."""
        columns = ", ".join(schema.PROBLEM_COLUMNS)
        measured = f"SELECT problem_id FROM measurements WHERE {self._of(environment)} AND reason IS NULL"
        rows = self._file.read(f"SELECT {columns} FROM problems WHERE id IN ({measured})")
        return frozenset(map(schema.problem_from, rows))

    def versions(self, environment: Environment) -> dict[str, tuple[int, ...]]:
        """Return the versions of each algorithm that have results in this environment, ascending."""
        sql = f"SELECT DISTINCT algorithm, version FROM measurements WHERE {self._of(environment)} ORDER BY 1, 2"
        versions = grouped((row["algorithm"], row["version"]) for row in self._file.read(sql))
        return {name: tuple(ascending) for name, ascending in versions.items()}

    def environments(self) -> tuple[Environment, ...]:
        """Return all environments (machines with their software) that have rows, sorted."""
        with_rows = " UNION ".join(f"SELECT environment_id FROM {table}" for table in schema.KEYS)
        columns = ", ".join(schema.ENVIRONMENT_COLUMNS)
        rows = self._file.read(f"SELECT {columns} FROM environments WHERE id IN ({with_rows})")
        return tuple(sorted(Environment(*row) for row in rows))

    def info(self) -> tuple[EnvironmentRows, ...]:
        """Return the numbers of rows of each environment (machine and software)."""
        numbers = []
        for environment in self.environments():
            rows = self._file.read(schema.count_rows(self._of(environment)))
            counts = Counter({kind: count for kind, count, _ in rows})
            busy = sum(busy_rows for *_, busy_rows in rows)
            numbers.append(EnvironmentRows(environment, *(counts[kind] for kind in schema.KINDS), busy=busy))  # type: ignore[misc]
        return tuple(numbers)

    def _results(
        self, environment: Environment, problems: Iterable[ConvProblem], versions: Mapping[str, int]
    ) -> dict[ConvProblem, list[tuple[MicroConfig, list[Any]]]]:
        """Return, by problem, the micro-configs of these versions with their results, sorted.

        A result consists of the values of the columns ``_RESULT``.
        """
        by_problem: dict[ConvProblem, dict[MicroConfig, list[Any]]] = {problem: {} for problem in problems}
        by_id = {number: results for problem, results in by_problem.items() for number in self._ids([problem])}
        condition = f"{self._of(environment)} AND problem_id IN ({', '.join(map(str, by_id))})"
        columns = ", ".join(("problem_id", "algorithm", "version", "micro_batch_size", *_RESULT))
        micro_config = cache(MicroConfig)  # many rows share few micro-configs
        sql = schema.select("measurements", condition, columns)
        for problem_id, algorithm, version, size, *values in self._file.read(sql):
            if versions.get(algorithm) == version:
                by_id[problem_id][micro_config(algorithm, size)] = values
        return {problem: [*results.items()] for problem, results in by_problem.items()}

    def _of(self, environment: Environment | None = None, problems: Iterable[ConvProblem] | None = None) -> str:
        """Return the SQL condition that selects rows of an environment and of some problems; None selects all."""
        wanted = {"environment_id": None if environment is None else [environment], "problem_id": problems}
        ids = {name: ", ".join(map(str, self._ids(keys))) for name, keys in wanted.items() if keys is not None}
        return " AND ".join(["TRUE", *(f"{name} IN ({listed})" for name, listed in ids.items())])

    def _ids(self, keys: Iterable[Environment | ConvProblem]) -> list[int]:
        return [int(row[0]) for key in keys for row in self._file.read(*schema.find(key))]


def _kind(passed_over: int | None, needed_bytes: int | None, least_s: float | None) -> FailureKind:
    """Return the kind of a stored failure from its columns, of which only these depend on it."""
    if passed_over is None:
        return FailureKind.FAILED if least_s is None else FailureKind.SLOW
    if passed_over == 2:
        return FailureKind.TOO_MANY_FLOPS
    return FailureKind.HOPELESS if needed_bytes is None else FailureKind.TOO_LARGE


def _columns_of(micro_config: MicroConfig, version: int) -> Row:
    return {
        "algorithm": micro_config.algorithm,
        "version": version,
        "micro_batch_size": micro_config.micro_batch_size,
    }


def _columns(result: object, names: Sequence[str], samples: Sequence[str]) -> Row:
    """Return attributes of a result as columns of a row; those that are samples as bytes, if there are any."""
    values = {name: getattr(result, name) for name in names}
    return values | {name: packed(name, getattr(result, name)) for name in samples if getattr(result, name)}
