"""Division of a workspace budget over convolutions, corrected by whole runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mucudnn.core.answers import TunedProblem
from mucudnn.core.records import Comparison, Configuration, Task
from mucudnn.core.values import format_bytes
from mucudnn.solver.division import Division, solve_wd
from mucudnn.solver.front import desirable_sets
from mucudnn.tuning.choose import baseline_or_declared, is_gain, is_timed, run_whole, timed, with_noise
from mucudnn.tuning.job import Context, Job, Outcome, exchange

_NO_GAIN = 1.001  # cost of configurations without a gain, as a multiple of the baseline: ties go to the baseline
_MOST_ROUNDS = 8  # rounds of solving and whole runs


def divide(
    jobs: Sequence[Job], budget_bytes: int | None, context: Context | None = None
) -> tuple[dict[Task, TunedProblem], Division[Task]]:
    """Choose one configuration for each task so that all fit the budget (workspace division), corrected by whole runs.

    Return the choices, and the solver's last division, in which the time of an option is that of its whole run (a
    complete call), or else predicted.

    The chosen configurations are run whole, and the budget is divided again with their times, until all chosen ones
    have been run. Each rank runs those of its own jobs.

    context: None in a replay, which makes no whole runs.

    Raises ``InfeasibleError`` with the smallest feasible budget.
    """
    options_of = {job.task: _Options(job) for job in jobs}
    for _ in range(_MOST_ROUNDS):
        without = {task: options.baseline for task, options in options_of.items() if not options.configurations}
        _run(without, options_of, context)
        division = _solve(options_of, budget_bytes)
        chosen = {task: options.original(division.assignment[task]) for task, options in options_of.items()}
        unknown = {task: choice for task, choice in chosen.items() if options_of[task].is_unknown(choice)}
        if not unknown:
            break
        _run(unknown, options_of, context)
    else:
        for options in options_of.values():
            options.configurations = [c for c in options.configurations if not options.is_unknown(c)]
        division = _solve(options_of, budget_bytes)
    return {task: options.choice(division.assignment[task]) for task, options in options_of.items()}, division


@dataclass(slots=True)
class _Options:
    """Configurations that a division of the budget may choose for one task, and their whole runs (complete calls)."""

    job: Job
    configurations: list[Configuration] = field(init=False)
    baseline: Configuration = field(init=False)
    runs: dict[Configuration, Comparison | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n, measurements = self.job.task.batch_size, self.job.allowed()
        self.configurations = [*desirable_sets(measurements, n).of(n)] if measurements else []
        unsolved = baseline_or_declared(measurements, n, self.job.declared_bytes)
        self.baseline = next((c for c in self.configurations if c.is_baseline), unsolved)
        self.learn_baseline(None)

    def learn_baseline(self, outcome: Outcome) -> None:
        """Learn the time of torch's own from a whole run, and add it to the options once its time is known.

        Whole runs may show it faster than predicted.
        """
        self.baseline = timed(self.baseline, outcome)
        if is_timed(self.baseline) and not any(c.is_baseline for c in self.configurations):
            self.configurations.append(self.baseline)

    def costed(self) -> list[Configuration]:
        """Return all options, each with its time from a whole run, or else its predicted time."""
        return [replace(c, time_s=self._time_s(c)) for c in self.configurations]

    def original(self, costed: Configuration) -> Configuration:
        """Return the option that ``costed`` was made from, with its predicted time."""
        return next(c for c in self.configurations if c.micro_configs == costed.micro_configs)

    def is_unknown(self, configuration: Configuration) -> bool:
        return not configuration.is_baseline and configuration not in self.runs

    def learn(self, configuration: Configuration, outcome: Outcome) -> None:
        if not configuration.is_baseline:
            if isinstance(outcome, Exception):
                self.configurations.remove(configuration)
                return
            self.runs[configuration] = outcome
        self.learn_baseline(outcome)

    def choice(self, costed: Configuration) -> TunedProblem:
        """Return the result for the task if the division chose ``costed``; its workspace becomes the task's limit."""
        chosen = self.original(costed)
        task = replace(self.job.task, limit_bytes=chosen.workspace_bytes)
        run, baseline_s = self.runs.get(chosen), self.baseline.time_s if is_timed(self.baseline) else None
        if chosen.is_baseline:
            reason = "PyTorch's own: nothing else is worth a segment of the budget"
            return TunedProblem.of(task, chosen, self.baseline.time_s, self.baseline.time_s, reason)
        if run is None:
            reason = "best use of the budget by prediction, not run"
            return TunedProblem.of(task, chosen, baseline_s, chosen.time_s, reason)
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


def _run(wanted: Mapping[Task, Configuration], options_of: Mapping[Task, _Options], context: Context | None) -> None:
    """Run one configuration of each task in ``wanted`` whole, each on the rank that measures the task; learn all."""
    if context is not None and context.ranks is not None and wanted:
        for task, configuration in wanted.items():
            run_whole(options_of[task].job, [configuration], context)
        exchange([options.job for options in options_of.values()], context.ranks)
    for task, configuration in wanted.items():
        options = options_of[task]
        options.learn(configuration, run_whole(options.job, [configuration], context)[configuration])


def _solve(options_of: Mapping[Task, _Options], budget_bytes: int | None) -> Division[Task]:
    costed = {task: options.costed() for task, options in options_of.items()}
    return solve_wd(costed, budget_bytes, counts={task: task.count for task in options_of})
