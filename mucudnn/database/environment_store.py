"""The database as tuning uses it: rows of one environment (machine and software), read and, if possible, added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

from mucudnn.database.database import Database
from mucudnn.running.environment import Environment
from mucudnn.words.errors import DatabaseError, InvalidInputError
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration, Failure, How, Measurement, MicroConfig, WholeRun
from mucudnn.words.warning import warn

P = ParamSpec("P")


class EnvironmentStore:
    """The database rows of one environment (machine and software).

    If the file cannot be written, there is one warning, and tuning goes on without writing.

    In all methods ``versions`` maps names of algorithms to versions; results of other versions are ignored. Reading
    raises ``DatabaseError`` if the file is unusable.
    """

    def __init__(self, database: Database, environment: Environment) -> None:
        self._database, self.environment = database, environment
        self._writable = True

    def results(self, problem: ConvProblem, versions: Mapping[str, int]) -> list[Measurement | Failure]:
        """Return the valid measurement or failure of each micro-config (algorithm and micro-batch size)."""
        key = (self.environment, problem, versions)
        return [*self._database.measurements(*key), *self._database.failures(*key)]

    def every_measurement(self, versions: Mapping[str, int]) -> Mapping[ConvProblem, Sequence[Measurement]]:
        """Return, by problem, the valid measurement of each micro-config (algorithm and micro-batch size)."""
        problems = self._database.problems(self.environment)
        return self._database.measurements_of_all(self.environment, problems, versions)

    def add(self, problem: ConvProblem, version: int, result: Measurement | Failure) -> None:
        """Commit a result of an algorithm with this version. Failures that may not occur again are not stored."""
        if isinstance(result, Measurement):
            self._write(self._database.add, self.environment, problem, version, result)
        elif result.is_lasting:
            self._write(self._database.add_failure, self.environment, problem, version, result)

    def whole_run(
        self,
        problem: ConvProblem,
        configuration: Configuration,
        versions: Mapping[str, int],
        how: How = None,
    ) -> WholeRun | None:
        """Return the valid whole run (times of complete calls) of this configuration, or None."""
        return self._database.whole_run(self.environment, problem, configuration.micro_configs, versions, how)

    def whole_runs(
        self, problem: ConvProblem, versions: Mapping[str, int], how: How = None
    ) -> Mapping[tuple[MicroConfig, ...], WholeRun]:
        """Return the valid whole runs (times of complete calls) of all configurations, of any batch size."""
        return self._database.whole_runs(self.environment, problem, versions, how)

    def add_whole_run(
        self,
        problem: ConvProblem,
        configuration: Configuration,
        versions: Mapping[str, int],
        run: WholeRun,
        how: How = None,
    ) -> None:
        """Commit a whole run: the times of complete calls of a configuration.

        how: special condition such as a cached filter.
        """
        key = (self.environment, problem, configuration.micro_configs, versions)
        self._write(self._database.add_whole_run, *key, run, how)

    def confirmation(self, fingerprint: str) -> tuple[str, dict[str, Any]] | None:
        """Return time stamp and findings of the valid confirmation (timed steps) of a model by fingerprint, or None."""
        return self._database.confirmation(self.environment, fingerprint)

    def add_confirmation(self, fingerprint: str, findings: Mapping[str, Any], load: float | None) -> None:
        """Commit what was found by timing a model's steps. Arguments: ``Database.add_confirmation``."""
        self._write(self._database.add_confirmation, self.environment, fingerprint, findings, load)

    def best_rate(self) -> float:
        """Return the best stored rate of the reference kernel, in runs per second, or 0 if no rate is stored."""
        return self._database.best_rate(self.environment)

    def add_rate(self, rate: float) -> None:
        """Commit a rate of the reference kernel (runs per second), if it is higher than the stored rate."""
        self._write(self._database.add_rate, self.environment, rate)

    def _write(self, add: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if not self._writable:
            return
        try:
            add(*args, **kwargs)
        except InvalidInputError as error:
            warn(f"tuning goes on, but will measure this again: {error}")
        except DatabaseError as error:
            self._writable = False
            warn(f"tuning goes on, but its measurements are not stored: {error}")
