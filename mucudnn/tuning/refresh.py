"""Measures again what is doubtful in a database: disturbed by others, or noisier than it should be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial

from mucudnn.database import schema
from mucudnn.database.configuration_keys import whole_run_from
from mucudnn.database.database import Database
from mucudnn.database.environment_store import EnvironmentStore
from mucudnn.database.rows import is_doubtful_row
from mucudnn.database.schema import PROBLEM_COLUMNS, Row
from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.measuring.candidates import find_candidates
from mucudnn.measuring.quiet import Outcomes, Quiet
from mucudnn.measuring.race import RaceJob
from mucudnn.measuring.thorough_race import ThoroughRace
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.environment import Environment
from mucudnn.tuning.cached_filters import compare_cached
from mucudnn.tuning.choose import is_gain
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.progress import Progress, silent
from mucudnn.words.results import (
    Configuration,
    How,
    Measurement,
    MicroConfig,
    WholeRun,
    WithCachedFilter,
    WithFreshWorkspace,
    epilogue_of,
)

MOST_WAITED_S = 60.0  # for a quiet machine: nothing is measured again before


@dataclass(frozen=True, slots=True)
class RefreshedMeasurement:
    """A measurement as it was, and as it is now."""

    problem: ConvProblem
    before: Measurement
    now: Measurement


@dataclass(frozen=True, slots=True)
class RefreshedRun:
    """A whole run as it was, and as it is now."""

    problem: ConvProblem
    configuration: Configuration
    before: WholeRun
    now: WholeRun

    @property
    def has_turned(self) -> bool:
        """Whether it is faster now than what it is compared with, and was not before, or the other way round."""
        return is_gain(self.before) != is_gain(self.now)


@dataclass(frozen=True, slots=True)
class Refreshed:
    """Results of refreshing one environment.

    doubtful: how many measurements and whole runs there were to measure again. passed_over: those of them that cannot
    win any more, that failed, or whose algorithms are not here in that version. busy: what disturbed, so that the rest
    was left as it is; empty: nothing. interrupted: by Ctrl-C.
    """

    environment: Environment
    doubtful: int
    measurements: tuple[RefreshedMeasurement, ...] = ()
    whole_runs: tuple[RefreshedRun, ...] = ()
    passed_over: int = 0
    busy: str = ""
    interrupted: bool = False

    @property
    def disturbed(self) -> int:
        """Number of those that were disturbed once more."""
        measured = sum(one.now.is_disturbed for one in self.measurements)
        return measured + sum(run.now.is_disturbed for run in self.whole_runs)

    @property
    def left(self) -> int:
        """Number of those that are still to be measured again."""
        return self.doubtful - len(self.measurements) - len(self.whole_runs) - self.passed_over


def refresh(
    database: Database,
    machine: Machine,
    *,
    everything: bool = False,
    older_than: timedelta | None = None,
    progress: Progress | None = None,
) -> Refreshed:
    """Measure again what is doubtful of the machine's environment, or also what is older, or everything.

    Nothing is measured before others leave the cores, for which it waits a minute at most. Each result is stored as it
    is made, beside the one that it replaces. So Ctrl-C loses nothing: then the answer says that it was ``interrupted``.

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
    """One refreshing of a database."""

    def __init__(self, database: Database, machine: Machine, progress: Progress) -> None:
        self.machine, self.progress, self.done = machine, progress, 0.0
        self.store = EnvironmentStore(database, machine.environment)
        self.quiet = Quiet(machine.watch, self.store, lambda text: progress(text, self.done), MOST_WAITED_S)
        self.measurements: list[RefreshedMeasurement] = []
        self.whole_runs: list[RefreshedRun] = []
        self.passed_over = 0

    def run(self, rows: Sequence[Row], wanted: Sequence[Row]) -> Refreshed:
        every, again = _by_problem(rows), _by_problem(wanted)
        busy, interrupted = "", False
        try:
            if again:
                self.machine.watch.pause()  # to see what others do before anything is measured
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
        """Refresh one problem. rows: all that count. again: those to be measured again."""
        measured = [row for row in rows if row["kind"] == "measurement"]
        sizes = sorted({row["micro_batch_size"] for row in measured}) or [1]
        here = {algorithm.name: algorithm for algorithm in self._algorithms(problem, sizes)}
        versions = {name: algorithm.version for name, algorithm in here.items()}
        doubtful = [row for row in again if row["kind"] == "measurement"]
        if doubtful:
            known = {_micro_config(row): _measurement(row) for row in measured if _is_of(versions, row)}
            before = {_micro_config(row): _measurement(row) for row in doubtful if _is_of(versions, row)}
            self._measure(problem, sizes, [*here.values()], known, before)
            self.passed_over += len(doubtful) - sum(one.problem == problem for one in self.measurements)
        self._run_whole(problem, [row for row in again if row["kind"] == "verification"], versions)

    def _measure(
        self,
        problem: ConvProblem,
        sizes: Sequence[int],
        algorithms: Sequence[Algorithm],
        every: Mapping[MicroConfig, Measurement],
        before: Mapping[MicroConfig, Measurement],
    ) -> None:
        """Measure what was ``before`` once more, in a race with ``every`` other measurement, as the tuner does."""
        versions = {algorithm.name: algorithm.version for algorithm in algorithms}
        known = [measurement for of, measurement in every.items() if of not in before]

        proofs = self.machine.proofs(max(sizes), checks_samples=True)
        candidates, _ = find_candidates(problem, algorithms, sizes, known, proofs)
        job = RaceJob(
            problem,
            max(sizes),
            [candidate for candidate in candidates if candidate.micro_config in every],
            known=known,
            may_keep=problem.operation is Operation.FORWARD,
            device=self.machine.device,
            clock=self.machine.clock,
            watch=self.machine.watch,
        )
        now: dict[MicroConfig, RefreshedMeasurement] = {}
        try:
            for result in self.quiet.measured(ThoroughRace(job)):
                self.store.add(problem, versions[result.micro_config.algorithm], result)
                if isinstance(result, Measurement):
                    now[result.micro_config] = RefreshedMeasurement(problem, before[result.micro_config], result)
        finally:
            self.measurements += now.values()

    def _algorithms(self, problem: ConvProblem, sizes: Sequence[int]) -> list[Algorithm]:
        offered = (algorithm for source in self.machine.sources for algorithm in source.offered(problem, sizes))
        return [*self.machine.algorithms, *offered]

    def _run_whole(self, problem: ConvProblem, rows: Sequence[Row], here: Mapping[str, int]) -> None:
        """Run whole again what can be run here; of one batch size in the same turns, as when it was chosen."""
        together: dict[tuple[int, How], list[tuple[Configuration, Row]]] = defaultdict(list)
        for row in rows:
            micro_configs, versions, how = whole_run_from(row["configuration"])
            if any(here.get(name) != version for name, version in versions.items()):
                self.passed_over += 1
                continue
            configuration = Configuration(micro_configs, row["time_s"], 0)
            together[configuration.batch_size, how].append((configuration, row))
        for (_, how), runs in together.items():
            configurations = [configuration for configuration, _ in runs]
            outcomes = self.quiet.compared(problem, configurations, partial(self._compare, problem, how))
            for (configuration, row), outcome in zip(runs, outcomes, strict=True):
                self._keep(problem, configuration, row, how, outcome, here)

    def _keep(
        self,
        problem: ConvProblem,
        configuration: Configuration,
        row: Row,
        how: How,
        outcome: WholeRun | Exception | None,
        versions: Mapping[str, int],
    ) -> None:
        if not isinstance(outcome, WholeRun):
            self.passed_over += 1
            return
        before = WholeRun(*(row[name] for name in (*schema.TIMES, "load")))
        self.store.add_whole_run(problem, configuration, versions, outcome, how)
        self.whole_runs.append(RefreshedRun(problem, configuration, before, outcome))

    def _compare(self, problem: ConvProblem, how: How, configurations: Sequence[Configuration]) -> Outcomes:
        if not isinstance(how, WithCachedFilter):
            n = configurations[0].batch_size
            keeps_workspace = not isinstance(how, WithFreshWorkspace)
            return self.machine.compare(
                problem, n, configurations, keeps_workspace=keeps_workspace, epilogue=epilogue_of(how)
            )
        run = (how.algorithm, Configuration(how.instead_of, configurations[0].time_s, 0), how.epilogue)
        return [compare_cached(self.machine, problem, one, *run) for one in configurations]


def _by_problem(rows: Sequence[Row]) -> dict[ConvProblem, list[Row]]:
    found: dict[ConvProblem, list[Row]] = defaultdict(list)
    for row in rows:
        found[schema.problem_from([row[column] for column in PROBLEM_COLUMNS])].append(row)
    return found


def _is_of(versions: Mapping[str, int], row: Row) -> bool:
    return bool(versions.get(row["algorithm"]) == row["version"])


def _micro_config(row: Row) -> MicroConfig:
    return MicroConfig(row["algorithm"], row["micro_batch_size"])


def _measurement(row: Row) -> Measurement:
    return Measurement(_micro_config(row), *(row[name] for name in (*schema.COSTS, "load")))
