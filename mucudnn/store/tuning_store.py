"""The database as tuning uses it: the rows of one environment, and a copy for processes that share their measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import ParamSpec

from mucudnn.core.errors import DatabaseError, InvalidInputError, warn
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Environment, Failure, Measurement
from mucudnn.store.database import Database
from mucudnn.store.schema import Row
from mucudnn.store.sqlite_file import MEMORY

P = ParamSpec("P")
_IN_MEMORY = "tuning goes on, but its measurements are kept in memory only"


class EnvironmentStore:
    """The database rows of one environment (machine and software).

    ``whole_run``, ``whole_runs``, ``add_whole_run``, ``timing``, ``timings`` and ``add_timing`` are the methods of
    ``Database`` with this environment as the first argument. If the file cannot be written, tuning warns once and
    continues without writing.

    In all methods ``versions`` maps algorithm names to versions; results of other versions are ignored. Reading raises
    ``DatabaseError`` if the file is unusable.
    """

    def __init__(self, database: Database, environment: Environment) -> None:
        self._database, self.environment = database, environment
        self._writable = True
        self.whole_run = partial(database.whole_run, environment)
        self.whole_runs = partial(database.whole_runs, environment)
        self.add_whole_run = partial(self._if_writable(database.add_whole_run), environment)
        self.timing = partial(database.timing, environment)
        self.timings = partial(database.timings, environment)
        self.add_timing = partial(self._if_writable(database.add_timing), environment)

    def results(self, problem: ConvProblem, versions: Mapping[str, int]) -> list[Measurement | Failure]:
        """Return the measurement or failure of each micro-config (algorithm and micro-batch size)."""
        key = (self.environment, problem, versions)
        return [*self._database.measurements(*key), *self._database.failures(*key)]

    def every_measurement(self, versions: Mapping[str, int]) -> Mapping[ConvProblem, Sequence[Measurement]]:
        """Return, by problem, the measurement of each micro-config (algorithm and micro-batch size)."""
        problems = self._database.problems(self.environment)
        return self._database.measurements_of_all(self.environment, problems, versions)

    def add(self, problem: ConvProblem, version: int, result: Measurement | Failure) -> None:
        """Commit a result of an algorithm with this version. Transient failures are not stored."""
        if isinstance(result, Measurement):
            self._if_writable(self._database.add)(self.environment, problem, version, result)
        elif result.is_lasting:
            self._if_writable(self._database.add_failure)(self.environment, problem, version, result)

    def _if_writable(self, add: Callable[P, None]) -> Callable[P, None]:
        """Wrap ``add`` so that an error becomes a warning and stops all later writes."""

        def write(*args: P.args, **kwargs: P.kwargs) -> None:
            if not self._writable:
                return
            try:
                add(*args, **kwargs)
            except InvalidInputError as error:
                warn(f"tuning goes on, but will measure this again: {error}")
            except DatabaseError as error:
                self._writable = False
                warn(f"tuning goes on, but its measurements are not stored: {error}")

        return write


class CopyingDatabase(Database):
    """Copy of a database file in memory. Added rows are also written to the file at once.

    Nothing is lost if the process ends, and rows that other processes add to the file do not change later answers.
    ``take`` adds rows of other processes. A file that cannot be written is abandoned after one warning.
    """

    def __init__(self, file: Database) -> None:
        super().__init__(MEMORY)
        file._file.copy_to(self._file)
        self._behind: Database | None = None if file.read_only else file
        self._fresh: list[Row] = []
        if file.read_only:
            warn(f"{_IN_MEMORY}: database {file.path} cannot be written")

    def fresh_rows(self) -> Sequence[Row]:
        """Return the rows added since the last call of this method, except those added by ``take``."""
        rows, self._fresh = self._fresh, []
        return rows

    def take(self, rows: Iterable[Row], *, copies: bool) -> None:
        """Add missing rows of other processes, with their time stamps.

        copies: whether to write them to the file.
        """
        new = [*rows]
        self.add_exported(new)
        if copies and new:
            self._copy(Database.add_exported, new)

    def commit(self, row: Row) -> None:
        self._copy(Database.commit, row)
        super().commit(row)
        self._fresh.append(row)

    def _copy(self, add: Callable[..., object], rows: Row | Sequence[Row]) -> None:
        """Add rows to the file, too, until that fails."""
        if self._behind is None:
            return
        try:
            add(self._behind, rows)
        except DatabaseError as error:
            self._behind = None
            warn(f"{_IN_MEMORY}: {error}")
