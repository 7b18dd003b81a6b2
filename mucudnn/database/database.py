"""Everything that was ever measured, in one SQLite file.

Rows are only added, each with its time stamp and committed at once; the newest row of a key counts. So nothing measured
is lost, processes that share the file cannot undo each other's work, and merging two files is the union of their rows.
What newer rows supersede stays until ``prune``. One kind of row is taken back, that a run has begun: see ``Store``.
"""

from __future__ import annotations

import csv
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from mucudnn.configuration import Failure, Measurement, MicroConfig
from mucudnn.database import profiles, schema, upkeep
from mucudnn.database.file import MEMORY, DatabaseFile
from mucudnn.database.schema import How
from mucudnn.environment import Environment
from mucudnn.problem import ConvProblem


@dataclass(frozen=True, slots=True)
class Verification:
    """A configuration run whole, and its baseline, measured in turns: medians, and the relative noise.

    The baseline is torch's own convolution; of a run with a kept filter it is what keeps nothing.
    """

    baseline_s: float
    time_s: float
    noise: float


@dataclass(frozen=True, slots=True)
class EnvironmentRows:
    """How many rows an environment has, superseded ones included."""

    environment: Environment
    measurements: int
    failures: int
    verifications: int


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """What ``mucudnn database info`` tells."""

    path: Path
    size_bytes: int
    schema_version: int
    environments: tuple[EnvironmentRows, ...]


@dataclass(frozen=True, slots=True)
class MergeCounts:
    """Rows taken over, rows that were there before, and rows of problems that this version does not know."""

    added: int
    known: int
    incompatible: int


def default_path() -> Path:
    """``$MUCUDNN_DATABASE``, else ``mucudnn/measurements.sqlite`` in the user's cache folder."""
    if named := os.environ.get("MUCUDNN_DATABASE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mucudnn" / "measurements.sqlite"


class Database:
    """Measurements, failures and verifications, each under its environment, problem, and algorithms with versions.

    path: the file, made with its folder where missing; None: ``default_path()``; ``":memory:"``: kept in no file.
    read_only: never write. Files that cannot be written are opened so in any case: ask ``read_only``, and go on with
    ``copy_in_memory()`` where measurements are to be added all the same.

    Use it as a context manager, and from one thread. Every method raises ``DatabaseError`` where the file cannot be
    used: not SQLite, damaged, newer, or locked by another process for longer than ``timeout_s``.
    """

    def __init__(self, path: Path | str | None = None, *, read_only: bool = False, timeout_s: float = 60.0) -> None:
        self._file = DatabaseFile(
            default_path() if path is None else Path(path),
            schema=schema.TABLES,
            application_id=schema.APPLICATION_ID,
            version=schema.VERSION,
            migrations=schema.MIGRATIONS,
            read_only=read_only,
            timeout_s=timeout_s,
        )

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
        self._file.close()

    def copy_in_memory(self) -> Database:
        """The same rows, in a database that takes more and forgets them when it is closed."""
        copy = Database(MEMORY)
        self._file.copy_to(copy._file)
        return copy

    def add(
        self, environment: Environment, problem: ConvProblem, algorithm_version: int, measurement: Measurement
    ) -> None:
        """Commit one measurement."""
        costs = [getattr(measurement, name) for name in schema.COSTS]
        self._add_measured(environment, problem, algorithm_version, measurement.micro_config, (*costs, None))

    def add_failure(
        self, environment: Environment, problem: ConvProblem, algorithm_version: int, failure: Failure
    ) -> None:
        """Commit that a micro-config cannot be measured, with the reason."""
        no_costs = [None] * len(schema.COSTS)
        values = (*no_costs, failure.reason)
        self._add_measured(environment, problem, algorithm_version, failure.micro_config, values)

    def withdraw_failure(
        self, environment: Environment, problem: ConvProblem, algorithm_version: int, failure: Failure
    ) -> None:
        """Commit that there was no such failure: rows of this micro-config with another reason, or none, stay."""
        with self._file.writing() as connection:
            owner = (schema.identify(connection, environment), schema.identify(connection, problem))
            key = (failure.micro_config.algorithm, algorithm_version, failure.micro_config.micro_batch_size)
            connection.execute(schema.WITHDRAW_FAILURE, (*owner, *key, failure.reason))

    def add_verification(
        self,
        environment: Environment,
        problem: ConvProblem,
        micro_configs: Sequence[MicroConfig],
        versions: Mapping[str, int],
        verification: Verification,
        how: How = None,
    ) -> None:
        """Commit a whole run. versions: of at least the algorithms that ran. how: what was special in it."""
        key = schema.configuration_key(micro_configs, versions, how)
        values = (verification.baseline_s, verification.time_s, verification.noise)
        self._add("verifications", environment, problem, (key, schema.now(), *values))

    def measurements(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Measurement, ...]:
        """The newest of each micro-config, sorted. versions: of the algorithms asked for; others are left out."""
        return tuple(
            Measurement(micro_config, **{name: schema.number(row[name]) for name in schema.COSTS})
            for micro_config, row in self._newest(environment, problem, versions)
            if row["reason"] is None
        )

    def failures(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Failure, ...]:
        """Micro-configs whose newest row is a failure, sorted. versions: as for ``measurements``."""
        newest = self._newest(environment, problem, versions)
        return tuple(Failure(micro_config, row["reason"]) for micro_config, row in newest if row["reason"] is not None)

    def verification(
        self,
        environment: Environment,
        problem: ConvProblem,
        micro_configs: Sequence[MicroConfig],
        versions: Mapping[str, int],
        how: How = None,
    ) -> Verification | None:
        """The newest whole run of this very configuration, None if there was none."""
        key = schema.configuration_key(micro_configs, versions, how)
        rows = [row for row in self._rows("verifications", environment, problem) if row["configuration"] == key]
        if not rows:
            return None
        return Verification(*(schema.number(rows[-1][name]) for name in ("baseline_s", "time_s", "noise")))

    def whole_runs(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int], how: How = None
    ) -> dict[tuple[MicroConfig, ...], Verification]:
        """The newest whole run of every configuration, of any batch size. versions, how: as for ``verification``."""
        found: dict[tuple[MicroConfig, ...], Verification] = {}
        for row in self._rows("verifications", environment, problem):
            micro_configs = schema.micro_configs_from(row["configuration"], versions, how)
            if micro_configs is not None:
                values = (schema.number(row[name]) for name in ("baseline_s", "time_s", "noise"))
                found[micro_configs] = Verification(*values)
        return found

    def environments(self) -> tuple[Environment, ...]:
        """All that have rows, sorted."""
        rows = self._file.read(f"SELECT {schema.ENVIRONMENT} FROM environments WHERE {schema.HAS_ROWS}")
        return tuple(sorted(Environment(*row) for row in rows))

    def problems(self, environment: Environment) -> frozenset[ConvProblem]:
        """All that have measurements, without those that this version does not know."""
        return profiles.problems(self._file, environment)

    def versions(self, environment: Environment) -> dict[str, tuple[int, ...]]:
        """Algorithm -> its versions that have measurements or failures, ascending: the last is the newest."""
        return profiles.versions(self._file, environment)

    def measurements_of_all(
        self, environment: Environment, problems: Iterable[ConvProblem], versions: Mapping[str, int]
    ) -> dict[ConvProblem, tuple[Measurement, ...]]:
        """As ``measurements``, of many problems in one query."""
        return profiles.measurements(self._file, environment, problems, versions)

    def info(self) -> DatabaseInfo:
        """What is in the file, and how much. size_bytes: of the file alone, 0 in memory."""
        size_bytes = self.path.stat().st_size if self.path.exists() else 0
        rows = tuple(EnvironmentRows(e, *upkeep.count(self._file, e)) for e in self.environments())
        return DatabaseInfo(self.path, size_bytes, schema.VERSION, rows)

    def export_csv(self, stream: TextIO) -> None:
        """All rows, oldest first, with a heading; ``kind`` is measurement, failure or verification."""
        writer = csv.writer(stream)  # lines end in CR LF, as RFC 4180 has it: then values with either are quoted
        writer.writerow(schema.EXPORT_COLUMNS)
        writer.writerows(self._file.read(schema.EXPORT))

    def export_json_lines(self, stream: TextIO) -> None:
        """The same rows as ``export_csv``, one JSON object a line, without the columns that a kind does not have."""
        for row in self._file.read(schema.EXPORT):
            named = zip(schema.EXPORT_COLUMNS, row, strict=True)
            stream.write(json.dumps({name: value for name, value in named if value is not None}) + "\n")

    def add_exported(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows as they were exported, with their time stamps: all of them or, on error, none.

        rows: by ``schema.EXPORT_COLUMNS``, without faults (see ``database.rules``), and no two of them, nor one that is
        here, with the same key and time stamp.
        """
        with self._file.writing() as connection:
            profiles.add_exported(connection, rows)

    def merge(self, other: Path | str) -> MergeCounts:
        """Add the rows of another database, which is only read, that are not here: all of them or, on error, none."""
        with Database(other, read_only=True) as source, self._file.writing() as connection:
            return MergeCounts(**upkeep.merge(connection, source._file))

    def prune(
        self,
        *,
        environments: Sequence[Environment] | None = None,
        versions: Mapping[str, int] | None = None,
        dry_run: bool = False,
    ) -> int:
        """Remove the rows that newer ones supersede, and return how many rows (would) go.

        environments: one or more, if given: the rows of all others go as well. versions: if given, those of all other
        algorithms and versions go as well, but for engines. dry_run: remove nothing.
        """
        with self._file.writing() as connection:
            removed = upkeep.prune(connection, environments, versions)
            if dry_run:
                connection.rollback()
        if removed and not dry_run:
            self._file.compact()
        return removed

    def _add_measured(
        self,
        environment: Environment,
        problem: ConvProblem,
        version: int,
        micro_config: MicroConfig,
        values: Sequence[Any],
    ) -> None:
        key = (micro_config.algorithm, version, micro_config.micro_batch_size)
        self._add("measurements", environment, problem, (*key, schema.now(), *values))

    def _add(self, table: str, environment: Environment, problem: ConvProblem, values: Sequence[Any]) -> None:
        with self._file.writing() as connection:
            owner = (schema.identify(connection, environment), schema.identify(connection, problem))
            schema.insert(connection, table, (*owner, *values), otherwise="REPLACE")

    def _newest(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> list[tuple[MicroConfig, sqlite3.Row]]:
        rows = self._rows("measurements", environment, problem)
        asked_for = (row for row in rows if versions.get(row["algorithm"]) == row["version"])
        return sorted({MicroConfig(row["algorithm"], row["micro_batch_size"]): row for row in asked_for}.items())

    def _rows(self, table: str, environment: Environment, problem: ConvProblem) -> list[sqlite3.Row]:
        """All rows of a key, oldest first."""
        environment_id, environment_values = schema.find(environment)
        problem_id, problem_values = schema.find(problem)
        return self._file.read(
            f"SELECT * FROM {table} WHERE environment_id = ({environment_id}) AND problem_id = ({problem_id}) "
            "ORDER BY measured_at",
            environment_values + problem_values,
        )
