"""Repeated measurement of doubtful results in a database: disturbed by other processes, or too noisy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Generic, TypeVar

from mucudnn.database import schema
from mucudnn.database.configuration_keys import whole_run_from
from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.database.rows import is_doubtful_row
from mucudnn.database.schema import PROBLEM_COLUMNS, Row
from mucudnn.measuring.candidates import Candidate, find_candidates
from mucudnn.measuring.quiet import Outcomes, Quiet
from mucudnn.measuring.thorough_race import ThoroughRace
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.environment import Environment
from mucudnn.tuning.choose import is_gain
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress, silent
from mucudnn.words.results import (
    Configuration,
    Measurement,
    MicroConfig,
    WholeRun,
)
from mucudnn.words.task import Task

MOST_WAITED_S = 60.0  # for a quiet machine, without which nothing is repeated


R = TypeVar("R", Measurement, WholeRun)


@dataclass(frozen=True, slots=True)
class Again(Generic[R]):
    """A result before and after its repetition. of: the micro-config or configuration that was measured."""

    problem: ConvProblem
    of: MicroConfig | Configuration
    before: R
    now: R


def has_turned(run: Again[WholeRun]) -> bool:
    """Whether the repeated run changed the verdict on a configuration between gain and no gain."""
    return is_gain(run.before) != is_gain(run.now)


@dataclass(frozen=True, slots=True)
class Refreshed:
    """Results of repeating the doubtful measurements of one environment (a machine with its settings).

    doubtful: number of measurements and whole runs to repeat. passed_over: how many of these can no longer win, failed,
    or have algorithms that are not available in that version. busy: the disturbance that ended the refresh; empty if
    there was none. interrupted: whether Ctrl-C ended it.
    """

    environment: Environment
    doubtful: int
    measurements: tuple[Again[Measurement], ...] = ()
    whole_runs: tuple[Again[WholeRun], ...] = ()
    passed_over: int = 0
    busy: str = ""
    interrupted: bool = False

    @property
    def disturbed(self) -> int:
        """Number of repeated results that were disturbed again."""
        measured = sum(one.now.is_disturbed for one in self.measurements)
        return measured + sum(run.now.is_disturbed for run in self.whole_runs)

    @property
    def left(self) -> int:
        """Number of doubtful results that were neither measured again nor passed over."""
        return self.doubtful - len(self.measurements) - len(self.whole_runs) - self.passed_over


def refresh(
    database: Database,
    machine: Machine,
    *,
    everything: bool = False,
    older_than: timedelta | None = None,
    progress: Progress | None = None,
) -> Refreshed:
    """Repeat doubtful measurements of the machine's environment, and on request old ones or all.

    The function first waits up to a minute for free cores. Each result is stored at once, next to the result that it
    replaces, so that Ctrl-C loses nothing; the return value is then marked ``interrupted``.

    Raises ``DatabaseError`` for a file that cannot be read.
    """
    before = None if older_than is None else (datetime.now(UTC) - older_than).isoformat(timespec="microseconds")
    rows = database.rows_that_count(machine.environment)
    wanted = [row for row in rows if _is_wanted(row, everything, before)]
    return _Refresh(database, machine, progress or silent).run(rows, wanted)


def _is_wanted(row: Row, everything: bool, before: str | None) -> bool:
    if row["kind"] == "failure":
        return False
    is_old = before is not None and row["measured_at"] < before
    return everything or is_old or is_doubtful_row(row)


class _Refresh:
    """A single pass that repeats the doubtful measurements in a database."""

    def __init__(self, database: Database, machine: Machine, progress: Progress) -> None:
        self.machine, self.progress, self.done = machine, progress, 0.0
        self.store = EnvironmentStore(database, machine.environment)
        self.quiet = Quiet(machine.watch, self.store, lambda text: progress(text, self.done), MOST_WAITED_S)
        self.measurements: list[Again[Measurement]] = []
        self.whole_runs: list[Again[WholeRun]] = []
        self.passed_over = 0

    def run(self, rows: Sequence[Row], wanted: Sequence[Row]) -> Refreshed:
        every, again = _by_problem(rows), _by_problem(wanted)
        busy, interrupted = "", False
        try:
            if again:
                self.machine.watch.pause()  # to read the load before measuring
            for number, problem in enumerate(again):
                self.done = number / len(again)
                load = self.quiet.wait()
                if not load.is_free:
                    busy = str(load)
                    break
                self.progress(f"{problem}: measuring again", self.done)
                self._refresh(problem, every[problem], again[problem])
        except KeyboardInterrupt:
            interrupted = True
        self.quiet.store_rate()
        self.progress("done", 1.0)
        made = (tuple(self.measurements), tuple(self.whole_runs))
        return Refreshed(self.machine.environment, len(wanted), *made, self.passed_over, busy, interrupted)

    def _refresh(self, problem: ConvProblem, rows: Sequence[Row], again: Sequence[Row]) -> None:
        """Repeat the doubtful measurements of one problem.

        rows: all valid stored results of the problem. again: the results to repeat.
        """
        measured, doubtful = ([row for row in some if row["kind"] == "measurement"] for some in (rows, again))
        sizes = sorted({row["micro_batch_size"] for row in measured}) or [1]
        offered = (algorithm for source in self.machine.sources for algorithm in source.offered(problem, sizes))
        algorithms = [*self.machine.algorithms, *offered]
        versions = {algorithm.name: algorithm.version for algorithm in algorithms}
        if doubtful:
            every, before = _measurements(measured, versions), _measurements(doubtful, versions)
            known = [measurement for of, measurement in every.items() if of not in before]
            proofs = self.machine.proofs(max(sizes), checks_samples=True)
            candidates, _ = find_candidates(problem, algorithms, sizes, known, proofs)
            wanted = [candidate for candidate in candidates if candidate.micro_config in every]
            self._measure(problem, max(sizes), wanted, known, before, versions)
            self.passed_over += len(doubtful) - sum(one.problem == problem for one in self.measurements)
        self._run_whole(problem, [row for row in again if row["kind"] == "verification"], versions)

    def _measure(
        self,
        problem: ConvProblem,
        batch_size: int,
        candidates: Sequence[Candidate],
        known: Sequence[Measurement],
        before: Mapping[MicroConfig, Measurement],
        versions: Mapping[str, int],
    ) -> None:
        """Repeat the measurements in ``before`` in a race against the ``known`` results, as the tuner does."""
        may_keep = problem.operation is Operation.FORWARD
        race = ThoroughRace(Task(problem, batch_size), candidates, self.machine, known, may_keep=may_keep)
        now: dict[MicroConfig, Again[Measurement]] = {}
        try:
            for result in self.quiet.measured(race):
                of = result.micro_config
                self.store.add(problem, versions[of.algorithm], result)
                if isinstance(result, Measurement):
                    now[of] = Again(problem, of, before[of], result)
        finally:
            self.measurements += now.values()

    def _run_whole(self, problem: ConvProblem, rows: Sequence[Row], here: Mapping[str, int]) -> None:
        """Repeat the whole runs in ``rows`` whose algorithms are available, interleaved by batch size."""
        together: dict[tuple[int, bool], dict[Configuration, WholeRun]] = defaultdict(dict)
        for row in rows:
            micro_configs, versions, fresh = whole_run_from(row["configuration"])
            if any(here.get(name) != version for name, version in versions.items()):
                self.passed_over += 1
                continue
            configuration = Configuration(micro_configs, row["time_s"], 0)
            before = WholeRun(*(row[name] for name in (*schema.TIMES, "load")))
            together[configuration.batch_size, fresh][configuration] = before
        for (_, fresh), runs in together.items():
            outcomes = self.quiet.compared(problem, [*runs], partial(self._compare, problem, fresh))
            for (configuration, before), outcome in zip(runs.items(), outcomes, strict=True):
                if isinstance(outcome, WholeRun):
                    self.store.add_whole_run(problem, configuration.micro_configs, here, outcome, fresh=fresh)
                    self.whole_runs.append(Again(problem, configuration, before, outcome))
                else:
                    self.passed_over += 1

    def _compare(self, problem: ConvProblem, fresh: bool, configurations: Sequence[Configuration]) -> Outcomes:
        return self.machine.compare(problem, configurations[0].batch_size, configurations, keeps_workspace=not fresh)


def _by_problem(rows: Sequence[Row]) -> dict[ConvProblem, list[Row]]:
    found: dict[ConvProblem, list[Row]] = defaultdict(list)
    for row in rows:
        found[schema.problem_from([row[column] for column in PROBLEM_COLUMNS])].append(row)
    return found


def _measurements(rows: Sequence[Row], versions: Mapping[str, int]) -> dict[MicroConfig, Measurement]:
    """Return the measurements in ``rows`` of algorithms that are available in the same version."""
    found = {}
    for row in rows:
        if versions.get(row["algorithm"]) == row["version"]:
            of = MicroConfig(row["algorithm"], row["micro_batch_size"])
            found[of] = Measurement(of, *(row[name] for name in (*schema.COSTS, "load")))
    return found
