"""The database of measurements: methods that add results and read the valid ones."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any

from mucudnn.database import schema
from mucudnn.database.configuration_keys import configuration_key, micro_configs_from
from mucudnn.database.rows import StoredRows
from mucudnn.database.samples import sample_columns
from mucudnn.database.sqlite_file import MEMORY
from mucudnn.running.environment import Environment
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Failure, Measurement, MicroConfig, WholeRun

_MEASURED = (*schema.COSTS, "load")
_RESULT = ("reason", "passed_over", "needed_bytes", "least_s", *_MEASURED)
_RUN = (*schema.TIMES, "load")


def now() -> str:
    """Return the current time as text that sorts by time."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


class Database(StoredRows):
    """Measurements, failures, verifications and confirmations, by environment, problem and versions of algorithms.

    Environments are machines with their software. Among rows with the same key, the valid one is the newest row
    measured on a quiet machine, or else the newest row.
    """

    def copy_in_memory(self) -> Database:
        """Return a writable in-memory copy of all rows, which is lost when the returned database is closed."""
        copy = Database(MEMORY)
        self._file.copy_to(copy._file)
        return copy

    # Adding

    def add(
        self, environment: Environment, problem: ConvProblem, algorithm_version: int, measurement: Measurement
    ) -> None:
        """Commit one measurement. Like all methods that add rows, raises ``InvalidInputError`` for invalid values."""
        values = {name: getattr(measurement, name) for name in _MEASURED} | sample_columns(measurement.raw)
        key = _key(measurement.micro_config, algorithm_version)
        self._add("measurement", environment, problem, **key, **values)

    def add_failure(
        self, environment: Environment, problem: ConvProblem, algorithm_version: int, failure: Failure
    ) -> None:
        """Commit the failure to measure a micro-config (an algorithm and a micro-batch size), with its reason."""
        self._add(
            *("failure", environment, problem),
            **_key(failure.micro_config, algorithm_version),
            reason=failure.reason,
            passed_over=(2 if failure.by_arithmetic else 1) if failure.is_passed_over else None,
            needed_bytes=failure.needed_bytes,
            least_s=failure.least_s,
        )

    def add_whole_run(
        self,
        environment: Environment,
        problem: ConvProblem,
        micro_configs: Sequence[MicroConfig],
        versions: Mapping[str, int],
        run: WholeRun,
        *,
        fresh: bool = False,
    ) -> None:
        """Commit a whole run: the times of complete calls of a configuration.

        versions: versions of at least the algorithms that ran. fresh: whether each call allocated its workspace.
        """
        key = configuration_key(micro_configs, versions, fresh=fresh)
        values = {name: getattr(run, name) for name in _RUN} | sample_columns(run.raw)
        self._add("verification", environment, problem, configuration=key, **values)

    def add_confirmation(
        self, environment: Environment, fingerprint: str, findings: Mapping[str, Any], load: float | None = None
    ) -> None:
        """Commit a confirmation: findings from timing a model's steps.

        fingerprint: identifies the model and its tuned choices. findings: JSON values; ``versions`` has the versions of
        the algorithms that the model ran.
        """
        self._add("confirmation", environment, None, fingerprint=fingerprint, load=load, findings=json.dumps(findings))

    def add_rate(self, environment: Environment, rate: float) -> None:
        """Commit a rate of the reference kernel (runs per second), if it is higher than the stored rate."""
        if rate > self.best_rate(environment):
            with self._file.writing() as connection:
                schema.add_rate(connection, environment, rate)

    def _add(self, kind: str, environment: Environment, problem: ConvProblem | None, **values: object) -> None:
        owner = schema.named(environment) | ({} if problem is None else schema.named(problem))
        try:
            self.commit({"kind": kind, "measured_at": now(), **owner, **values})
        except InvalidInputError as error:
            raise InvalidInputError(f"this {kind} of {problem or 'a model'} cannot be stored: {error}") from None

    # Reading

    def measurements(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Measurement, ...]:
        """Return the valid measurement of each micro-config (algorithm and micro-batch size), sorted.

        versions: versions of the algorithms to return.
        """
        return self.measurements_of_all(environment, [problem], versions)[problem]

    def failures(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int]
    ) -> tuple[Failure, ...]:
        """Return the valid failures, sorted.

        versions: versions of the algorithms to return.
        """
        return tuple(
            Failure(
                m,
                reason,
                is_passed_over=passed_over is not None,
                by_arithmetic=passed_over == 2,
                needed_bytes=needed,
                least_s=least_s,
            )
            for m, (reason, passed_over, needed, least_s, *_) in self._results(environment, [problem], versions)[
                problem
            ]
            if reason is not None
        )

    def measurements_of_all(
        self, environment: Environment, problems: Iterable[ConvProblem], versions: Mapping[str, int]
    ) -> dict[ConvProblem, tuple[Measurement, ...]]:
        """Return the valid measurements of many problems by problem, in one query."""
        return {
            problem: tuple(Measurement(m, *measured) for m, (reason, _, _, _, *measured) in found if reason is None)
            for problem, found in self._results(environment, problems, versions).items()
        }

    def whole_run(
        self,
        environment: Environment,
        problem: ConvProblem,
        micro_configs: Sequence[MicroConfig],
        versions: Mapping[str, int],
        *,
        fresh: bool = False,
    ) -> WholeRun | None:
        """Return the valid whole run (times of complete calls) of exactly this configuration; None if there is none."""
        condition = f"{self._of(environment, [problem])} AND configuration = ?"
        rows = self._counting("verifications", condition, [configuration_key(micro_configs, versions, fresh=fresh)])
        return _whole_run(rows[0]) if rows else None

    def whole_runs(
        self, environment: Environment, problem: ConvProblem, versions: Mapping[str, int], *, fresh: bool = False
    ) -> dict[tuple[MicroConfig, ...], WholeRun]:
        """Return the valid whole run (times of complete calls) of each configuration, of any batch size.

        Arguments are as for ``whole_run``.
        """
        rows = self._counting("verifications", self._of(environment, [problem]))
        found = ((micro_configs_from(row["configuration"], versions, fresh=fresh), row) for row in rows)
        return {micro_configs: _whole_run(row) for micro_configs, row in found if micro_configs is not None}

    def confirmation(self, environment: Environment, fingerprint: str) -> tuple[str, dict[str, Any]] | None:
        """Return time stamp and findings of a model's valid confirmation (timed steps); None if there is none."""
        rows = self._counting("confirmations", f"{self._of(environment)} AND fingerprint = ?", [fingerprint])
        return (rows[0]["measured_at"], json.loads(rows[0]["findings"])) if rows else None

    def best_rate(self, environment: Environment) -> float:
        """Return the best stored rate of the reference kernel, in runs per second; 0 if none is stored."""
        rows = self._file.read(f"SELECT rate FROM rates WHERE {self._of(environment)}")
        return float(rows[0][0]) if rows else 0.0

    def problems(self, environment: Environment) -> frozenset[ConvProblem]:
        """Return all problems that have measurements in this environment."""
        measured = f"SELECT problem_id FROM measurements WHERE {self._of(environment)} AND reason IS NULL"
        columns = ", ".join(schema.PROBLEM_COLUMNS)
        rows = self._file.read(f"SELECT {columns} FROM problems WHERE id IN ({measured})")
        return frozenset(map(schema.problem_from, rows))

    def versions(self, environment: Environment) -> dict[str, tuple[int, ...]]:
        """Return, by algorithm, the versions that have measurements or failures, newest last."""
        found: dict[str, tuple[int, ...]] = {}
        for algorithm, version in self._file.read(
            f"SELECT DISTINCT algorithm, version FROM measurements WHERE {self._of(environment)} ORDER BY 1, 2"
        ):
            found[algorithm] = (*found.get(algorithm, ()), version)
        return found

    def _results(
        self, environment: Environment, problems: Iterable[ConvProblem], versions: Mapping[str, int]
    ) -> dict[ConvProblem, list[tuple[MicroConfig, list[Any]]]]:
        """Return, by problem, the micro-configs of these versions with their valid results, sorted.

        A result consists of the values of the columns ``_RESULT``.
        """
        found: dict[ConvProblem, list[tuple[MicroConfig, list[Any]]]] = {problem: [] for problem in problems}
        by_id = {number: results for problem, results in found.items() for number in self._ids([problem])}
        condition = f"{self._of(environment)} AND problem_id IN ({', '.join(map(str, by_id))})"
        columns = ", ".join(("problem_id", "algorithm", "version", "micro_batch_size", *_RESULT))
        micro_config = cache(MicroConfig)  # many rows share few micro-configs
        for problem_id, algorithm, version, size, *values, _ in self._counting(
            "measurements", condition, columns=columns
        ):
            if versions.get(algorithm) == version:
                by_id[problem_id].append((micro_config(algorithm, size), values))
        return found


def _key(micro_config: MicroConfig, version: int) -> dict[str, Any]:
    return {
        "algorithm": micro_config.algorithm,
        "version": version,
        "micro_batch_size": micro_config.micro_batch_size,
    }


def _whole_run(row: sqlite3.Row) -> WholeRun:
    return WholeRun(*(row[name] for name in _RUN))
