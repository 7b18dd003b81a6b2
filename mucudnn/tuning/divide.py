"""Division of a workspace budget over convolutions, corrected by whole runs, which a callable provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from mucudnn.core.records import Comparison, Configuration, Measurement, Task
from mucudnn.core.values import format_bytes
from mucudnn.solver.division import Division, DivisionProblem, solve_wd
from mucudnn.solver.front import desirable_sets
from mucudnn.tuning.choose import Outcome, Verify, baseline_or_declared, is_gain, is_timed, timed, with_noise
from mucudnn.tuning.result import TunedProblem

_NO_GAIN = 1.001  # cost of configurations without a gain, as a multiple of the baseline: ties go to the baseline
_MOST_ROUNDS = 8  # rounds of solving and whole runs

Wanted = Mapping[Task, Sequence[Configuration]]  # configurations to verify next


@dataclass(frozen=True, slots=True)
class Divided:
    """A divided workspace budget: the choices, the solver's result, and its options with the times that it used.

    An option's time is from its whole run (a complete call), or else predicted.
    """

    choices: Mapping[Task, TunedProblem]
    division: Division[Task]
    options: Mapping[Task, Sequence[Configuration]]

    def program(self, suffix: str) -> str:
        """Return the integer program of the last division as the text of an ``.lp`` or ``.mps`` file."""
        problem = DivisionProblem.of(self.options, self.division.counts)
        return problem.program(self.division.budget_bytes, suffix)


def divide(
    measurements: Mapping[Task, Sequence[Measurement]],
    budget_bytes: int | None,
    verify: Verify,
    baseline_bytes: Mapping[Task, int | None] | None = None,
    ahead: Callable[[Wanted], None] = lambda wanted: None,
) -> Divided:
    """Choose one configuration for each task so that all fit the budget (workspace division), corrected by whole runs.

    The chosen configurations are run whole, and the budget is divided again with their times, until all chosen ones
    have been run. measurements, baseline_bytes: by task, as for ``choose``. ahead: called with all configurations that
    ``verify`` will need next, so that several processes can share the work.

    Raises ``InfeasibleError`` with the smallest feasible budget.
    """
    declared = baseline_bytes or {}
    every = {task: _Options(task, known, declared.get(task)) for task, known in measurements.items()}
    run = partial(_run, every, verify, ahead)
    for _ in range(_MOST_ROUNDS):
        run({task: options.baseline for task, options in every.items() if not options.configurations})
        division = _solve(every, budget_bytes)
        chosen = {task: options.original(division.assignment[task]) for task, options in every.items()}
        if not run({task: one for task, one in chosen.items() if every[task].is_unknown(one)}):
            break
    else:
        for options in every.values():
            options.forget_unknown()
        division = _solve(every, budget_bytes)
    choices = {task: options.choice(division.assignment[task]) for task, options in every.items()}
    return Divided(choices, division, {task: options.costed() for task, options in every.items()})


@dataclass(slots=True)
class _Options:
    """Configurations that a division of the budget may choose for one task, and their whole runs (complete calls)."""

    task: Task
    measurements: Sequence[Measurement]
    baseline_bytes: int | None
    configurations: list[Configuration] = field(init=False)
    baseline: Configuration = field(init=False)
    runs: dict[Configuration, Comparison | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = self.task.batch_size
        self.configurations = [*desirable_sets(self.measurements, n).of(n)] if self.measurements else []
        unsolved = baseline_or_declared(self.measurements, n, self.baseline_bytes)
        self.baseline = next((c for c in self.configurations if c.is_baseline), unsolved)
        self._offer_baseline()

    def _offer_baseline(self) -> None:
        """Add torch's own to the options once its time is known, since whole runs may show it faster than predicted."""
        if is_timed(self.baseline) and not any(c.is_baseline for c in self.configurations):
            self.configurations.append(self.baseline)

    def learn_baseline(self, outcome: Outcome) -> None:
        """Learn the time of torch's own from a whole run, and add it to the options if its time is known."""
        self.baseline = timed(self.baseline, outcome)
        self._offer_baseline()

    def costed(self) -> list[Configuration]:
        """Return all options, each with its time from a whole run, or else its predicted time."""
        return [replace(c, time_s=self._time_s(c)) for c in self.configurations]

    def original(self, costed: Configuration) -> Configuration:
        """Return the option that ``costed`` was made from, with its predicted time."""
        return next(c for c in self.configurations if c.micro_configs == costed.micro_configs)

    def is_unknown(self, configuration: Configuration) -> bool:
        return not configuration.is_baseline and configuration not in self.runs

    def learn(self, configuration: Configuration, outcome: Outcome) -> None:
        if configuration.is_baseline:
            self.learn_baseline(outcome)
            return
        if isinstance(outcome, Exception):
            self.configurations.remove(configuration)
            return
        self.runs[configuration] = outcome
        self.learn_baseline(outcome)

    def forget_unknown(self) -> None:
        self.configurations = [c for c in self.configurations if not self.is_unknown(c)]

    def choice(self, costed: Configuration) -> TunedProblem:
        """Return the result for the task if the division chose ``costed``; its workspace becomes the task's limit."""
        chosen = self.original(costed)
        task = replace(self.task, limit_bytes=chosen.workspace_bytes)
        run, baseline_s = self.runs.get(chosen), self.baseline.time_s if is_timed(self.baseline) else None
        if chosen.is_baseline:
            reason = "PyTorch's own: nothing else is worth a segment of the budget"
            return TunedProblem.of(task, chosen, self.baseline.time_s, self.baseline.time_s, reason)
        if run is None:
            return TunedProblem.of(
                task, chosen, baseline_s, chosen.time_s, "best use of the budget by prediction, not run"
            )
        reason = f"best use of the budget in whole runs, speedup {with_noise(run)}"
        if run.speedup < 1:
            reason += f"; PyTorch's own needs {format_bytes(self.baseline.workspace_bytes)}"
        return TunedProblem.of(task, chosen, run.baseline_s, run.time_s, reason, run.load)

    def _time_s(self, configuration: Configuration) -> float:
        """Return the seconds of an option, from its whole run if there is one.

        A whole run counts by its ratio to torch's own, since the machine's speed may have changed.
        """
        if configuration.is_baseline:
            return self.baseline.time_s
        run = self.runs.get(configuration)
        if run is None:
            return configuration.time_s
        time_s = self.baseline.time_s / run.speedup
        return time_s if is_gain(run) else max(time_s, _NO_GAIN * self.baseline.time_s)


def _run(
    every: Mapping[Task, _Options],
    verify: Verify,
    ahead: Callable[[Wanted], None],
    wanted: Mapping[Task, Configuration],
) -> bool:
    """Learn one whole run for each task in ``wanted``, making missing ones; return False if there are no tasks."""
    if wanted:
        ahead({task: [configuration] for task, configuration in wanted.items()})
    for task, configuration in wanted.items():
        every[task].learn(configuration, verify(task, [configuration])[configuration])
    return bool(wanted)


def _solve(every: Mapping[Task, _Options], budget_bytes: int | None) -> Division[Task]:
    options = {task: options.costed() for task, options in every.items()}
    return solve_wd(options, budget_bytes, counts={task: task.count for task in every})
