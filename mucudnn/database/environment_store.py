"""The database as tuning uses it: rows of one environment, read and, as long as the file is writable, added."""

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
    """The rows of one environment; after one warning, tuning goes on without a file that cannot be written.

    ``versions`` maps names of algorithms to versions; results of other versions are ignored. Reading raises
    ``DatabaseError`` if the file is unusable.
    """

    def __init__(self, database: Database, environment: Environment) -> None:
        self._database, self.environment = database, environment
        self._writable = True

    def results(self, problem: ConvProblem, versions: Mapping[str, int]) -> list[Measurement | Failure]:
        """Return the valid result of each micro-config."""
        key = (self.environment, problem, versions)
        return [*self._database.measurements(*key), *self._database.failures(*key)]

    def every_measurement(self, versions: Mapping[str, int]) -> Mapping[ConvProblem, Sequence[Measurement]]:
        """Return the valid measurement of each micro-config, for all problems."""
        problems = self._database.problems(self.environment)
        return self._database.measurements_of_all(self.environment, problems, versions)

    def add(self, problem: ConvProblem, version: int, result: Measurement | Failure) -> None:
        """Commit one result of an algorithm of this version, except a failure that is not lasting."""
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
        """Return the valid whole run of this configuration, or None."""
        return self._database.whole_run(self.environment, problem, configuration.micro_configs, versions, how)

    def whole_runs(
        self, problem: ConvProblem, versions: Mapping[str, int], how: How = None
    ) -> Mapping[tuple[MicroConfig, ...], WholeRun]:
        """Return the valid whole runs of all configurations, of any batch size."""
        return self._database.whole_runs(self.environment, problem, versions, how)

    def add_whole_run(
        self,
        problem: ConvProblem,
        configuration: Configuration,
        versions: Mapping[str, int],
        run: WholeRun,
        how: How = None,
    ) -> None:
        """Commit a whole run. how: its special condition, if any."""
        key = (self.environment, problem, configuration.micro_configs, versions)
        self._write(self._database.add_whole_run, *key, run, how)

    def confirmation(self, fingerprint: str) -> tuple[str, dict[str, Any]] | None:
        """Return time stamp and findings of the latest valid confirmation of a model with this fingerprint, or None."""
        return self._database.confirmation(self.environment, fingerprint)

    def add_confirmation(
        self,
        environment: Environment,
        fingerprint: str,
        versions: Mapping[str, int],
        findings: Mapping[str, Any],
        load: float | None,
    ) -> None:
        """Commit the findings of a model's steps, here or on another rank, as ``Database.add_confirmation``."""
        self._write(self._database.add_confirmation, environment, fingerprint, versions, findings, load)

    def best_rate(self) -> float:
        """Return the best stored rate of the reference kernel, in runs per second; 0 if there is none."""
        return self._database.best_rate(self.environment)

    def add_rate(self, rate: float) -> None:
        """Commit a rate of the reference kernel, if it is higher than the stored one."""
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
