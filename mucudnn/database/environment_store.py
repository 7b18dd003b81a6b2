"""The database as tuning uses it: rows of one environment are read, and added while that is possible."""

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
    """A database that cannot be written to is left alone after one warning: tuning goes on with what it measures.

    ``versions`` maps the names of algorithms to their versions; results of other versions are not seen. Reading raises
    ``DatabaseError`` where the file is unusable.
    """

    def __init__(self, database: Database, environment: Environment) -> None:
        self._database, self.environment = database, environment
        self._writable = True

    def results(self, problem: ConvProblem, versions: Mapping[str, int]) -> list[Measurement | Failure]:
        """Return the result of each micro-config that counts."""
        key = (self.environment, problem, versions)
        return [*self._database.measurements(*key), *self._database.failures(*key)]

    def every_measurement(self, versions: Mapping[str, int]) -> Mapping[ConvProblem, Sequence[Measurement]]:
        """Return the newest measurement of each micro-config, of all problems."""
        problems = self._database.problems(self.environment)
        return self._database.measurements_of_all(self.environment, problems, versions)

    def add(self, problem: ConvProblem, version: int, result: Measurement | Failure) -> None:
        """Commit one result of an algorithm of this version. A failure that may not come back is not stored."""
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
        """Return the whole run of this configuration that counts, if there was one."""
        return self._database.whole_run(self.environment, problem, configuration.micro_configs, versions, how)

    def whole_runs(
        self, problem: ConvProblem, versions: Mapping[str, int], how: How = None
    ) -> Mapping[tuple[MicroConfig, ...], WholeRun]:
        """Return all of them, of any batch size."""
        return self._database.whole_runs(self.environment, problem, versions, how)

    def add_whole_run(
        self,
        problem: ConvProblem,
        configuration: Configuration,
        versions: Mapping[str, int],
        run: WholeRun,
        how: How = None,
    ) -> None:
        """Commit a whole run. how: what is special in it."""
        key = (self.environment, problem, configuration.micro_configs, versions)
        self._write(self._database.add_whole_run, *key, run, how)

    def confirmation(self, fingerprint: str) -> tuple[str, dict[str, Any]] | None:
        """Return when the confirmation that counts was made, and its findings; ``None``: there is none."""
        return self._database.confirmation(self.environment, fingerprint)

    def add_confirmation(
        self,
        environment: Environment,
        fingerprint: str,
        versions: Mapping[str, int],
        findings: Mapping[str, Any],
        load: float | None,
    ) -> None:
        """Commit what steps of a model have shown, here or on another rank. As ``Database.add_confirmation``."""
        self._write(self._database.add_confirmation, environment, fingerprint, versions, findings, load)

    def best_rate(self) -> float:
        """Return the best rate of the known kernel, in runs a second; 0 where none was seen."""
        return self._database.best_rate(self.environment)

    def add_rate(self, rate: float) -> None:
        """Commit a rate of the known kernel, which replaces a lower one."""
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
            warn(f"tuning goes on, but what it measures is not stored: {error}")
