"""Timings by name: of what no problem describes, each measured once and then stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Protocol

from mucudnn.core import VERSION
from mucudnn.core.config import Config
from mucudnn.core.errors import say_once
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Comparison, is_busy
from mucudnn.core.terminal import Progress
from mucudnn.measuring.heap import is_heap_kept
from mucudnn.measuring.quiet import BUSY_TEXT, Quiet
from mucudnn.measuring.turns import Rounds, compare_in_turns, in_turns
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.bands import Costs
from mucudnn.store.database import Database
from mucudnn.store.tuning_store import EnvironmentStore

Seconds = Sequence[Sequence[float]]  # samples of each call that was timed, in turns with the others


class Timed(Protocol):
    """A schedule that times its operators in a call."""

    def operator_times(self, arguments: tuple[Any, ...], /) -> dict[int, float]:
        """Return the seconds of each operator in a call, by index."""


class Timings:
    """Timings of graphs and groups: stored ones, and those that are measured now, and stored at once.

    All that are measured take ``config.time_limit`` together, or as long as they need. Disturbed ones are measured
    again on a quiet machine.

    left_s: of the time limit.
    band_costs: costs of bands, by problem, algorithm and number of operands.
    """

    def __init__(self, machine: Machine, database: Database, config: Config, progress: Progress) -> None:
        self.machine, self.progress = machine, progress
        self.left_s = inf if config.time_limit_s is None else config.time_limit_s
        self.band_costs: dict[tuple[ConvProblem, str, int], Costs | None] = {}
        self._store = EnvironmentStore(database, machine.environment)
        self._quiet = Quiet(machine.watch, progress, at=1.0)

    def of(self, what: str, measure: Callable[[], Seconds | None], *, in_any_case: bool = False) -> Seconds | None:
        """Return the samples of all calls that ``measure`` times; None where it returns None, which is not stored.

        what: says everything that the times depend on, apart from the machine and its software.
        in_any_case: whether to measure after the time limit, too; otherwise None is returned then for what is not
            stored.
        """
        heap = "heap kept, " if is_heap_kept() else ""
        subject, clock, watch = f"{VERSION}, {heap}{what}", self.machine.clock, self.machine.watch
        stored = self._store.timing(subject)
        if stored is not None and not (is_busy(stored[1]) and self._quiet.observe()):
            return stored[0]
        if self.left_s <= 0 and not in_any_case:
            return None if stored is None else stored[0]
        self._quiet.wait()
        for _ in range(2):
            start_s, mark = clock.now(), watch.mark()
            seconds = measure()
            load = watch.since(mark).share
            self.left_s -= clock.now() - start_s
            if seconds is None or not is_busy(load) or self.left_s <= 0 or not self._quiet.wait().is_quiet:
                break
        if seconds is not None:
            self._store.add_timing(subject, seconds, load)
            if is_busy(load):
                say_once(BUSY_TEXT)
        return seconds

    def in_calls(
        self,
        what: str,
        schedules: Callable[[], Sequence[Timed]],
        arguments: tuple[Any, ...],
        wanted: Sequence[tuple[int, int]],
        rounds: Rounds,
    ) -> Seconds | None:
        """Return the seconds of operators in calls of schedules, which get turns; None where there is no time for that.

        schedules: makes them.
        wanted: the operator's index, and the schedule's number, of each call whose samples are returned.
        """

        def measure() -> Seconds:
            calls = [partial(schedule.operator_times, arguments) for schedule in schedules()]
            within = replace(rounds, time_limit_s=min(rounds.time_limit_s, self.left_s))
            start_s, done = self.machine.clock.now(), list[list[dict[int, float]]]()
            for times in in_turns(calls):
                done.append(times)
                if within.is_enough(len(done), self.machine.clock.now() - start_s):
                    break
            return [[times[number][index] for times in done] for index, number in wanted]

        return self.of(what, measure)

    def compared(
        self, what: str, baseline: Callable[[], object], runs: Sequence[Callable[[], object]], rounds: Rounds
    ) -> dict[int, Comparison]:
        """Return comparisons of runs with a baseline, by number, without those that fail; also after the time limit.

        Raises any error of the baseline, and that of a run if all fail.
        """
        results: list[Comparison | Exception] = []

        def measure() -> Seconds | None:
            within = replace(rounds, time_limit_s=max(0.0, min(rounds.time_limit_s, self.left_s)))
            results[:] = compare_in_turns(baseline, runs, self.machine.clock, within, self.machine.watch)
            done = [result for result in results if isinstance(result, Comparison)]
            if len(done) < len(results):
                return None
            baseline_s = max((comparison.baseline_samples_s for comparison in done), key=len, default=())
            return [baseline_s, *(comparison.time_samples_s for comparison in done)]

        seconds = self.of(what, measure, in_any_case=True)
        if seconds is not None:
            baseline_s, *runs_s = seconds
            results[:] = [Comparison.of(baseline_s[: len(run_s)], run_s) for run_s in runs_s]
        comparisons = {number: result for number, result in enumerate(results) if isinstance(result, Comparison)}
        if not comparisons:
            raise next(result for result in results if isinstance(result, Exception))
        return comparisons
