"""Chooses the configuration that runs: the solver's answer, corrected by whole runs against torch.

Nothing is measured here. Whole runs come from a callable: the tuner's makes those that are missing, that of a replay
only looks them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from mucudnn.solver.division import Division, solve_wd
from mucudnn.solver.front import desirable_sets
from mucudnn.solver.reuse import Account, account_wr
from mucudnn.tuning.contenders import MOST_CONTENDERS, NEARLY_AS_FAST, best_of, contenders_near, fastest_within
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.results import Configuration, Measurement, MicroConfig, WholeRun
from mucudnn.words.task import Task
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.units import format_bytes

# A smaller lead is not worth it: tomorrow's machine may be another, and torch's own is never slower than torch.
LEAST_GAIN = 0.03
_NO_GAIN = 1.001  # times torch's own: what is not surely faster is no bargain, so that torch's own runs if it fits
_SURPRISING = 1.25  # times what was predicted: more is not the noise, so that others may be faster
_MOST_ROUNDS = 8  # of solving, running whole and solving again

Outcome = WholeRun | Exception | None  # the whole run; why it cannot run; None: nobody has run it
Verify = Callable[[Task, Sequence[Configuration]], Mapping[Configuration, Outcome]]
Wanted = Mapping[Task, Sequence[Configuration]]  # what is verified next


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration to run, and why.

    baseline_s: None where torch's own time is not known. limit_bytes: what it may use. account: what the solver found
    under that limit, before whole runs had their say; None where nothing that was measured fits, and for a share of a
    budget, which the division accounts for.
    """

    configuration: Configuration
    baseline_s: float | None
    time_s: float
    reason: str
    limit_bytes: int | None
    account: Account | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Divided:
    """A divided budget: the choice of each task, the account, and the options with the times that were solved with.

    Times of options are of whole runs where there were any.
    """

    choices: Mapping[Task, Choice]
    division: Division[Task]
    options: Mapping[Task, Sequence[Configuration]]


def choose(
    task: Task,
    measurements: Sequence[Measurement],
    verify: Verify,
    baseline_bytes: int | None = None,
    margin: float = NEARLY_AS_FAST,
) -> Choice:
    """Choose the contender that is the fastest in whole runs; torch's own unless that is faster by more than the noise.

    measurements: those that the config allows; there is a configuration within the task's limit. baseline_bytes: what
    torch's own needs where it is not among them; None: it is taken to need no more than its micro-batches. margin:
    contenders are predicted to take at most so many times as long as the fastest. Where their whole runs take much
    longer than predicted, what may be faster by prediction is run too.

    Raises the error of the whole runs if none succeeds, and torch's own is not within the limit either;
    ``InfeasibleError`` where torch's own alone may be within the limit, and nobody has run it.
    """
    account = _account(task, measurements)
    baseline = _baseline(measurements, task.batch_size, baseline_bytes)
    fastest = set() if account is None else {account.configuration}
    near = partial(contenders_near, fastest, measurements, task.batch_size, task.limit_bytes)
    outcomes = dict(verify(task, near(margin)[:MOST_CONTENDERS] or [baseline]))
    if (bound_s := _surprising_s(task, outcomes, baseline, measurements)) is not None:
        least_s = min(c.time_s for c in outcomes)
        others = [c for c in near(bound_s / least_s) if not (c.is_baseline or c in outcomes)]
        further = [c for c in others if c.time_s < bound_s]
        outcomes |= verify(task, further[:MOST_CONTENDERS]) if further else {}
    return replace(_choose(task, outcomes, baseline, measurements, verify), account=account)


def _surprising_s(
    task: Task,
    outcomes: Mapping[Configuration, Outcome],
    baseline: Configuration,
    measurements: Sequence[Measurement],
) -> float | None:
    """Return the seconds that others must be below by prediction to be worth a whole run; ``None``: none is.

    What slows torch's own as well is no surprise, nor that torch's own is faster than it was measured.
    """
    runs = _runs(outcomes)
    if not runs:
        return None
    best = best_of(runs, measurements)
    time_s = min(runs[best].time_s, baseline.time_s / runs[best].speedup)
    if best.is_baseline or time_s <= _SURPRISING * best.time_s:
        return None
    return min(time_s, baseline.time_s) if _fits(task, baseline) else time_s


def _runs(outcomes: Mapping[Configuration, Outcome]) -> dict[Configuration, WholeRun]:
    return {c: outcome for c, outcome in outcomes.items() if isinstance(outcome, WholeRun)}


def _choose(
    task: Task,
    outcomes: Mapping[Configuration, Outcome],
    baseline: Configuration,
    measurements: Sequence[Measurement],
    verify: Verify,
) -> Choice:
    runs = _runs(outcomes)
    if runs:
        gains = {configuration: run for configuration, run in runs.items() if is_gain(run)}
        best = best_of(gains or runs, measurements)
        return _verdict(task, best, runs[best], _timed(baseline, runs[best]))
    unrun = [configuration for configuration, outcome in outcomes.items() if outcome is None]
    if unrun:
        return _predicted_verdict(task, unrun[0], baseline)
    failed, error = next((c, outcome) for c, outcome in outcomes.items() if isinstance(outcome, Exception))
    baseline = _timed(baseline, None if _is_timed(baseline) else verify(task, [baseline])[baseline])
    if failed.is_baseline or not _fits(task, baseline) or not _is_timed(baseline):
        raise error
    reason = f"torch's own: {failed} failed in a whole run: {error}"
    return Choice(baseline, baseline.time_s, baseline.time_s, reason, task.limit_bytes)


def divide(
    measurements: Mapping[Task, Sequence[Measurement]],
    budget_bytes: int | None,
    verify: Verify,
    baseline_bytes: Mapping[Task, int | None] | None = None,
    ahead: Callable[[Wanted], None] = lambda wanted: None,
) -> Divided:
    """Choose one configuration for each task, in sum within the budget: workspace division, corrected by whole runs.

    What is chosen is run whole, and the budget divided again with what was learnt, until all that is chosen was run.
    measurements, baseline_bytes: of each task as for ``choose``. ahead: is told all that ``verify`` is asked next, task
    by task, so that several processes can share the work.

    Raises ``InfeasibleError`` with the smallest feasible budget.
    """
    declared = baseline_bytes or {}
    every = {task: _Options(task, known, declared.get(task)) for task, known in measurements.items()}
    _learn_what_follows(every, budget_bytes, verify, ahead)
    for _ in range(_MOST_ROUNDS):
        _require_any(every, verify, ahead)
        division = _solve(every, budget_bytes)
        if not _learn(every, division, verify, ahead):
            break
    else:
        for options in every.values():
            options.forget_unknown()
        division = _solve(every, budget_bytes)
    choices = {task: options.choice(division.assignment[task]) for task, options in every.items()}
    return Divided(choices, division, {task: options.costed() for task, options in every.items()})


def is_solvable(task: Task, measurements: Sequence[Measurement]) -> bool:
    """Return whether something covers the batch: what was measured within the limit, or torch's own without one."""
    if task.in_headroom or task.baseline_exempt:
        return True
    return bool(fastest_within(measurements, task.batch_size, task.limit_bytes))


def refuted(
    task: Task, measurements: Sequence[Measurement], runs: Mapping[tuple[MicroConfig, ...], WholeRun]
) -> tuple[tuple[MicroConfig, ...], ...]:
    """Return what whole runs of smaller batches show not to be worth it, where torch's own is within the limit."""
    slower = (parts for parts, run in runs.items() if not is_gain(run))
    sizes = {parts: sum(part.micro_batch_size for part in parts) for parts in slower}
    baselines = {parts: _baseline(measurements, n, None) for parts, n in sizes.items() if n < task.batch_size}
    return tuple(sorted(parts for parts, baseline in baselines.items() if _fits(task, baseline)))


def baseline_of(measurements: Sequence[Measurement], batch_size: int) -> Configuration | None:
    """Return torch's own convolution, undivided, if it was measured."""
    micro_config = MicroConfig(TORCHS_OWN, batch_size)
    for m in measurements:
        if m.micro_config == micro_config:
            return Configuration((micro_config,), m.setup_s + m.step_s, m.prepared_bytes + m.scratch_bytes)
    return None


def _baseline(measurements: Sequence[Measurement], batch_size: int, declared_bytes: int | None) -> Configuration:
    """Return torch's own convolution as it was measured, else with the time inf.

    Whole runs may still tell its time: measuring takes more memory. Undivided it needs no less than in micro-batches.
    """
    measured = baseline_of(measurements, batch_size)
    if measured is not None:
        return measured
    if declared_bytes is None:
        divided = (m for m in measurements if m.micro_config.algorithm == TORCHS_OWN)
        smaller = (m for m in divided if m.micro_config.micro_batch_size <= batch_size)
        declared_bytes = max((m.prepared_bytes + m.scratch_bytes for m in smaller), default=0)
    return Configuration((MicroConfig(TORCHS_OWN, batch_size),), inf, declared_bytes)


def _is_timed(baseline: Configuration) -> bool:
    return baseline.time_s < inf


def _timed(baseline: Configuration, run: Outcome) -> Configuration:
    """Return it with the time of a whole run where it was not measured."""
    if _is_timed(baseline) or not isinstance(run, WholeRun):
        return baseline
    return replace(baseline, time_s=run.baseline_s)


@dataclass(slots=True)
class _Options:
    """The options of one task in a division, and the whole runs of them.

    followed_s: torch's own with the task's epilogue, in seconds; ``None``: it has none, or nothing has told yet.
    """

    task: Task
    measurements: Sequence[Measurement]
    baseline_bytes: int | None
    configurations: list[Configuration] = field(init=False)
    baseline: Configuration = field(init=False)
    runs: dict[Configuration, WholeRun | None] = field(default_factory=dict)
    followed_s: float | None = None

    def __post_init__(self) -> None:
        self.configurations = [*self._desirable(self.measurements)]
        if self.task.epilogue is not None:  # what is slower than torch's own alone may compute it inside
            others = [m for m in self.measurements if m.micro_config.algorithm != TORCHS_OWN]
            self.configurations += [c for c in self._desirable(others) if c not in self.configurations]
        unsolved = _baseline(self.measurements, self.task.batch_size, self.baseline_bytes)
        self.baseline = next((c for c in self.configurations if c.is_baseline), unsolved)
        self._offer_baseline()

    def _desirable(self, measurements: Sequence[Measurement]) -> Sequence[Configuration]:
        n = self.task.batch_size
        return desirable_sets(measurements, n).of(n) if measurements else ()

    def _offer_baseline(self) -> None:
        """Add it once its time is known: whole runs may show that it is not as dominated as it seems."""
        if _is_timed(self.baseline) and not any(c.is_baseline for c in self.configurations):
            self.configurations.append(self.baseline)

    def learn_baseline(self, outcome: Outcome) -> None:
        """Add torch's own, if it runs whole."""
        self.baseline = _timed(self.baseline, outcome)
        if self.task.epilogue is not None and self.followed_s is None and isinstance(outcome, WholeRun):
            self.followed_s = outcome.baseline_s
        self._offer_baseline()

    def telling(self, budget_bytes: int | None) -> Configuration:
        """Return what to run first where an epilogue follows: most likely what will be chosen."""
        fits = (c for c in self.configurations if budget_bytes is None or c.workspace_bytes <= budget_bytes)
        return min((c for c in fits if not _is_torchs(c)), key=lambda c: c.time_s, default=self.baseline)

    def costed(self) -> list[Configuration]:
        """Return all options, with the times of whole runs where there were any."""
        return [replace(c, time_s=self._time_s(c)) for c in self.configurations]

    def original(self, costed: Configuration) -> Configuration:
        """Return the option with its predicted time."""
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

    def choice(self, costed: Configuration) -> Choice:
        chosen = self.original(costed)
        segment = chosen.workspace_bytes
        run, baseline_s = self.runs.get(chosen), self.baseline.time_s if _is_timed(self.baseline) else None
        if chosen.is_baseline:
            reason = "torch's own: nothing else is worth a segment of the budget"
            return Choice(chosen, self._baseline_s, self._baseline_s, reason, segment)
        if run is None:
            return Choice(chosen, baseline_s, chosen.time_s, "best use of the budget by prediction, not run", segment)
        reason = f"best use of the budget in whole runs, speedup {_with_noise(run)}"
        if run.speedup < 1:
            reason += f"; torch's own needs {format_bytes(self.baseline.workspace_bytes)}"
        return Choice(chosen, run.baseline_s, run.time_s, reason, segment)

    @property
    def _baseline_s(self) -> float:
        """Seconds of torch's own, with the epilogue where its time is known."""
        return self.baseline.time_s if self.followed_s is None else self.followed_s

    @property
    def _follows_s(self) -> float:
        """Seconds of the epilogue after torch's own, as far as they are known."""
        return 0.0 if self.followed_s is None else max(self.followed_s - self.baseline.time_s, 0.0)

    def _time_s(self, configuration: Configuration) -> float:
        """Return seconds. Whole runs count by their ratio to torch's: the machine may have changed its pace since.

        Where nobody has run it, torch's own is followed by the epilogue, and the others may compute it inside.
        """
        if configuration.is_baseline:
            return self._baseline_s
        run = self.runs.get(configuration)
        if run is None:
            return configuration.time_s + (self._follows_s if _is_torchs(configuration) else 0.0)
        time_s = self._baseline_s / run.speedup
        return time_s if is_gain(run) else max(time_s, _NO_GAIN * self._baseline_s)


def _solve(every: Mapping[Task, _Options], budget_bytes: int | None) -> Division[Task]:
    options = {task: options.costed() for task, options in every.items()}
    return solve_wd(options, budget_bytes, counts={task: task.count for task in every})


def _is_torchs(configuration: Configuration) -> bool:
    """Whether torch's own computes all micro-batches."""
    return set(configuration.algorithms) == {TORCHS_OWN}


def _learn_what_follows(
    every: Mapping[Task, _Options], budget_bytes: int | None, verify: Verify, ahead: Callable[[Wanted], None]
) -> None:
    """Run one option of each fused convolution: no measurement tells what torch's own takes with its epilogue."""
    fused = {task: options for task, options in every.items() if task.epilogue is not None}
    if wanted := {task: [options.telling(budget_bytes)] for task, options in fused.items()}:
        ahead(wanted)
        for task, (configuration,) in wanted.items():
            every[task].learn(configuration, verify(task, [configuration])[configuration])


def _require_any(every: Mapping[Task, _Options], verify: Verify, ahead: Callable[[Wanted], None]) -> None:
    """Add torch's own where nothing else is left."""
    if wanted := {task: [options.baseline] for task, options in every.items() if not options.configurations}:
        ahead(wanted)
        for task, (baseline,) in wanted.items():
            every[task].learn_baseline(verify(task, [baseline])[baseline])


def _learn(
    every: Mapping[Task, _Options], division: Division[Task], verify: Verify, ahead: Callable[[Wanted], None]
) -> bool:
    """Run what is chosen and was not run. Returns whether anything was."""
    chosen = {task: options.original(division.assignment[task]) for task, options in every.items()}
    wanted = {task: [one] for task, one in chosen.items() if every[task].is_unknown(one)}
    if wanted:
        ahead(wanted)
        for task, (configuration,) in wanted.items():
            every[task].learn(configuration, verify(task, [configuration])[configuration])
    return bool(wanted)


def _account(task: Task, measurements: Sequence[Measurement]) -> Account | None:
    """Solve by prediction; ``None`` where nothing that was measured is within the limit."""
    with suppress(InfeasibleError):
        return account_wr(measurements, task.batch_size, task.limit_bytes, what=str(task))
    return None


def _verdict(task: Task, best: Configuration, run: WholeRun, baseline: Configuration) -> Choice:
    if best.is_baseline:
        reason = "torch's own, undivided: nothing else that is allowed can compute this"
        return Choice(baseline, run.baseline_s, run.baseline_s, reason, task.limit_bytes)
    if not _fits(task, baseline):
        needed = format_bytes(baseline.workspace_bytes)
        reason = f"fastest within the limit, speedup {_with_noise(run)}; torch's own needs {needed}"
    elif is_gain(run):
        reason = f"fastest in whole runs, speedup {_with_noise(run)}"
    else:
        reason = f"torch's own: {best} is not faster by more than the noise or {LEAST_GAIN:.0%}"
        reason += f", speedup {_with_noise(run)}"
        return Choice(baseline, run.baseline_s, run.baseline_s, reason, task.limit_bytes)
    return Choice(best, run.baseline_s, run.time_s, reason, task.limit_bytes)


def _predicted_verdict(task: Task, fastest: Configuration, baseline: Configuration) -> Choice:
    """Choose where nobody has run anything whole."""
    if not _is_timed(fastest):
        raise InfeasibleError(
            f"{task}, batch {task.batch_size}: nothing that was measured is within the limit of "
            f"{format_bytes(task.limit_bytes)}, and torch's own was neither measured nor run whole at this batch size: "
            "measure it with mucudnn tune, where there is memory for it"
        )
    if not _is_timed(baseline):
        reason = "fastest by prediction, not run; torch's own was not measured at this batch size"
        return Choice(fastest, None, fastest.time_s, reason, task.limit_bytes)
    predicted = WholeRun(baseline.time_s, fastest.time_s, 0.0)
    if fastest.is_baseline or not _fits(task, baseline) or is_gain(predicted):
        reason = "fastest by prediction, not run"
        return Choice(fastest, baseline.time_s, fastest.time_s, reason, task.limit_bytes)
    reason = f"torch's own: by prediction {fastest} is not faster by {LEAST_GAIN:.0%}, not run"
    return Choice(baseline, baseline.time_s, baseline.time_s, reason, task.limit_bytes)


def _fits(task: Task, baseline: Configuration) -> bool:
    if task.in_headroom or task.baseline_exempt or task.limit_bytes is None:
        return True
    return baseline.workspace_bytes <= task.limit_bytes


def is_gain(run: WholeRun) -> bool:
    """Whether the configuration is faster than what it was compared with, by more than the noise."""
    return run.speedup - max(run.noise, LEAST_GAIN) > 1


def _with_noise(run: WholeRun) -> str:
    return f"{run.speedup:.2f} ± {run.noise:.2f}"
