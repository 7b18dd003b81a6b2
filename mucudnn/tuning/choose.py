"""The choice of the configuration to run: the solver's answer, corrected by timing whole runs against torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf

from mucudnn.core.answers import TunedProblem, relative_error_of
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.records import Comparison, Configuration, Measurement, MicroConfig, Task
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import format_bytes
from mucudnn.measuring.turns import RACE
from mucudnn.solver.front import desirable_sets
from mucudnn.solver.reuse import account_wr
from mucudnn.tuning.job import Context, Job, Outcome

MOST_CONTENDERS = 3
NEARLY_AS_FAST = 1.15  # predictions this close may differ by noise and by the error of summing up parts
JUST_AS_FAST = 1.07  # predictions this close usually differ by noise only
_EVEN = 1.03  # multiple of the fastest whole run that counts as equal, given the noise
_COARSE = 4  # multiple of the baseline's error above which JUST_AS_FAST counts as equal if the error is halved

# A smaller lead is ignored, since it may not be reproducible, while the baseline is never slower than torch.
LEAST_GAIN = 0.03
_SURPRISING = 1.25  # multiple of the prediction above which a whole run is no noise, and others are tried

_FEWEST_ROUNDS = RACE.least + 1  # with a first one that may not count


def run_whole(
    job: Job, configurations: Sequence[Configuration], context: Context | None
) -> dict[Configuration, Outcome]:
    """Return whole runs (complete calls) of configurations, compared with torch's own; make and store missing ones.

    Only whole runs of the job's ``outcomes`` are returned if another rank measures the job, in a replay, and if the
    time limit is over. The outcome is None if the configuration has not been run.
    """
    if job.barred() is not None:  # there is no baseline to compare with
        return dict.fromkeys(configurations)
    if job.is_own and context is not None:
        unknown = [c for c in configurations if c.micro_configs not in job.outcomes]
        task, quiet, store, versions = job.task, context.quiet, context.store, context.versions
        fresh = task.in_headroom
        missing = []
        for configuration in _in_time(unknown, context, is_first=not job.outcomes):
            stored = store.whole_run(task.problem, configuration.micro_configs, versions, fresh=fresh)
            if stored is None or (stored.is_disturbed and quiet.observe()):
                missing.append(configuration)
            else:
                job.outcomes[configuration.micro_configs] = stored
        for configuration, outcome in zip(missing, _compared(task, missing, context), strict=True):
            job.outcomes[configuration.micro_configs] = outcome
            quiet.remember(task.problem, configuration, outcome.load if isinstance(outcome, Comparison) else None)
            if isinstance(outcome, Comparison):
                store.add_whole_run(task.problem, configuration.micro_configs, versions, outcome, fresh=fresh)
    return {c: job.outcomes.get(c.micro_configs) for c in configurations}


def _compared(task: Task, configurations: Sequence[Configuration], context: Context) -> Sequence[Outcome]:
    """Compare whole calls of configurations; repeat once if they were disturbed and the machine is quiet now."""
    if not configurations:
        return []
    outcomes: Sequence[Outcome] = []
    for _ in range(2):
        if not context.quiet.wait().is_quiet and outcomes:
            break
        outcomes = context.machine.compare(
            task.problem, task.batch_size, configurations, keeps_workspace=not task.in_headroom
        )
        if not any(isinstance(outcome, Comparison) and outcome.is_disturbed for outcome in outcomes):
            break
    return outcomes


def _in_time(configurations: Sequence[Configuration], context: Context, *, is_first: bool) -> Sequence[Configuration]:
    """Return the first configurations whose whole runs end within the time limit, at least one if none was run."""
    if context.due_s is None or context.config.workspace_budget_bytes is not None:
        return configurations
    left_s = context.due_s - context.machine.clock.now()
    kept: list[Configuration] = []
    for configuration in configurations:
        in_a_round_s = configuration.time_s + sum(max(c.time_s, configuration.time_s) for c in kept)
        if not (is_first and not kept) and _FEWEST_ROUNDS * (in_a_round_s + configuration.time_s) > left_s:
            break
        kept.append(configuration)
    return kept


def choose(job: Job, context: Context | None = None) -> TunedProblem:
    """Choose the configuration with the fastest whole run, or torch's own unless it is slower by more than the noise.

    Some configuration must fit the task's limit. Configurations are run if their predicted time is about as long as the
    fastest's. If their whole runs take much longer than predicted, further ones are run.

    context: None in a replay, which makes no whole runs.

    Raises the error of the whole runs if all fail and torch's own does not fit the limit, and ``InfeasibleError`` if
    only torch's own may fit the limit but has never been run.
    """
    task, measurements = job.task, job.allowed()
    account = None
    with suppress(InfeasibleError):  # nothing that was measured is within the limit
        account = account_wr(measurements, task.batch_size, task.limit_bytes, what=str(task))
    baseline = baseline_or_declared(measurements, task.batch_size, job.declared_bytes)
    fastest = set() if account is None else {account.configuration}
    near = partial(contenders_near, fastest, measurements, task.batch_size, task.limit_bytes)
    margin = NEARLY_AS_FAST if context is None else JUST_AS_FAST
    outcomes = run_whole(job, near(margin)[:MOST_CONTENDERS] or [baseline], context)
    if (bound_s := _surprising_s(task, outcomes, baseline, measurements)) is not None:
        least_s = min(c.time_s for c in outcomes)
        fast = [c for c in near(bound_s / least_s) if c.time_s < bound_s]
        further = [c for c in fast if not (c.is_baseline or c in outcomes)]
        outcomes |= run_whole(job, further[:MOST_CONTENDERS], context)
    return replace(_verdict(job, outcomes, baseline, measurements, context), account=account)


def _surprising_s(
    task: Task,
    outcomes: Mapping[Configuration, Outcome],
    baseline: Configuration,
    measurements: Sequence[Measurement],
) -> float | None:
    """Return the predicted seconds up to which further configurations are to be run whole; None if none are.

    Further ones are run if the best was slower than predicted, unless torch's own was too, or was faster than measured.
    """
    runs = _runs(outcomes)
    if not runs:
        return None
    best = best_of(runs, measurements)
    time_s = min(runs[best].time_s, baseline.time_s / runs[best].speedup)
    if best.is_baseline or time_s <= _SURPRISING * best.time_s:
        return None
    return min(time_s, baseline.time_s) if _fits(task, baseline) else time_s


def _runs(outcomes: Mapping[Configuration, Outcome]) -> dict[Configuration, Comparison]:
    return {c: outcome for c, outcome in outcomes.items() if isinstance(outcome, Comparison)}


def _verdict(
    job: Job,
    outcomes: Mapping[Configuration, Outcome],
    baseline: Configuration,
    measurements: Sequence[Measurement],
    context: Context | None,
) -> TunedProblem:
    task, runs = job.task, _runs(outcomes)
    if runs:
        gains = {configuration: run for configuration, run in runs.items() if is_gain(run)}
        best = best_of(gains or runs, measurements)
        return _verdict_of_run(task, best, runs[best], timed(baseline, runs[best]))
    unrun = [configuration for configuration, outcome in outcomes.items() if outcome is None]
    if unrun:
        return _predicted_verdict(task, unrun[0], baseline)
    failed, error = next((c, outcome) for c, outcome in outcomes.items() if isinstance(outcome, Exception))
    if not is_timed(baseline):
        baseline = timed(baseline, run_whole(job, [baseline], context)[baseline])
    if failed.is_baseline or not _fits(task, baseline) or not is_timed(baseline):
        raise error
    reason = f"PyTorch's own: {failed} failed in a whole run: {error}"
    return TunedProblem.of(task, baseline, baseline.time_s, baseline.time_s, reason)


def is_solvable(task: Task, measurements: Sequence[Measurement]) -> bool:
    """Return whether a configuration covers the batch: measured and within the limit, or torch's own if exempt."""
    if task.in_headroom or task.baseline_exempt:
        return True
    return bool(fastest_within(measurements, task.batch_size, task.limit_bytes))


def refuted(
    task: Task, measurements: Sequence[Measurement], runs: Mapping[tuple[MicroConfig, ...], Comparison]
) -> tuple[tuple[MicroConfig, ...], ...]:
    """Return configurations of smaller batches whose whole runs were not faster than torch's own, where that fits."""
    slower = (parts for parts, run in runs.items() if not is_gain(run))
    sizes = {parts: sum(part.micro_batch_size for part in parts) for parts in slower}
    baselines = {
        parts: baseline_or_declared(measurements, n, None) for parts, n in sizes.items() if n < task.batch_size
    }
    return tuple(sorted(parts for parts, baseline in baselines.items() if _fits(task, baseline)))


def baseline_of(measurements: Sequence[Measurement], batch_size: int) -> Configuration | None:
    """Return the configuration of torch's own convolution, undivided; None if it was not measured."""
    micro_config = MicroConfig(TORCHS_OWN, batch_size)
    for m in measurements:
        if m.micro_config == micro_config:
            return Configuration((micro_config,), m.setup_s + m.step_s, m.prepared_bytes + m.scratch_bytes)
    return None


def baseline_or_declared(
    measurements: Sequence[Measurement], batch_size: int, declared_bytes: int | None
) -> Configuration:
    """Return torch's own undivided configuration; if it was not measured, with infinite time and estimated workspace.

    The estimate is at least the workspace of its micro-batches. A whole run may still succeed, since it takes less
    memory than measuring.
    """
    measured = baseline_of(measurements, batch_size)
    if measured is not None:
        return measured
    if declared_bytes is None:
        divided = (m for m in measurements if m.micro_config.algorithm == TORCHS_OWN)
        smaller = (m for m in divided if m.micro_config.micro_batch_size <= batch_size)
        declared_bytes = max((m.prepared_bytes + m.scratch_bytes for m in smaller), default=0)
    return Configuration((MicroConfig(TORCHS_OWN, batch_size),), inf, declared_bytes)


def is_timed(baseline: Configuration) -> bool:
    return baseline.time_s < inf


def timed(baseline: Configuration, run: Outcome) -> Configuration:
    """Return the baseline (torch's own), with its time from the whole run if it was not measured."""
    if is_timed(baseline) or not isinstance(run, Comparison):
        return baseline
    return replace(baseline, time_s=run.baseline_s)


def _verdict_of_run(task: Task, best: Configuration, run: Comparison, baseline: Configuration) -> TunedProblem:
    chosen, time_s = best, run.time_s
    if best.is_baseline:
        chosen, time_s = baseline, run.baseline_s
        reason = "PyTorch's own, undivided: nothing else that is allowed can compute this"
    elif not _fits(task, baseline):
        needed = format_bytes(baseline.workspace_bytes)
        reason = f"fastest within the limit, speedup {with_noise(run)}; PyTorch's own needs {needed}"
    elif is_gain(run):
        reason = f"fastest in whole runs, speedup {with_noise(run)}"
    else:
        chosen, time_s = baseline, run.baseline_s
        faster = f"faster by more than the noise or {LEAST_GAIN:.0%}"
        reason = f"PyTorch's own: {best} is not {faster}, speedup {with_noise(run)}"
    return TunedProblem.of(task, chosen, run.baseline_s, time_s, reason, run.load)


def _predicted_verdict(task: Task, fastest: Configuration, baseline: Configuration) -> TunedProblem:
    """Choose between the fastest configuration and torch's own by predicted times, without whole runs."""
    if not is_timed(fastest):
        raise InfeasibleError(
            f"{task}, batch {task.batch_size}: nothing that was measured is within the limit of "
            f"{format_bytes(task.limit_bytes)}, and PyTorch's own was neither measured nor run whole at this size: "
            "measure it with mucudnn tune, where there is memory for it"
        )
    if not is_timed(baseline):
        reason = "fastest by prediction, not run; PyTorch's own was not measured at this batch size"
        return TunedProblem.of(task, fastest, None, fastest.time_s, reason)
    predicted = Comparison(baseline.time_s, fastest.time_s, 0.0)
    chosen, reason = fastest, "fastest by prediction, not run"
    if not (fastest.is_baseline or is_gain(predicted)) and _fits(task, baseline):
        chosen, reason = baseline, f"PyTorch's own: by prediction {fastest} is not faster by {LEAST_GAIN:.0%}, not run"
    return TunedProblem.of(task, chosen, baseline.time_s, chosen.time_s, reason)


def _fits(task: Task, baseline: Configuration) -> bool:
    if task.in_headroom or task.baseline_exempt or task.limit_bytes is None:
        return True
    return baseline.workspace_bytes <= task.limit_bytes


def is_gain(run: Comparison) -> bool:
    """Whether the configuration of this run is faster than torch's own by more than the noise."""
    return run.is_faster(LEAST_GAIN)


def with_noise(run: Comparison) -> str:
    return f"{run.speedup:.2f} ± {run.noise:.2f}"


def contenders_near(
    fastest: set[Configuration],
    measurements: Sequence[Measurement],
    batch_size: int,
    limit_bytes: int | None,
    margin: float,
) -> list[Configuration]:
    """Return the configurations whose predicted time is within ``margin`` times the fastest's, fastest first.

    To the fastest are added the best configurations of each single algorithm: with any sizes, divided, and undivided.
    Torch's own is returned only if there is no other.

    fastest: the configuration that is predicted to be the fastest, if any fits.
    """
    contenders = fastest
    bounds = _least_times(measurements, batch_size)
    for name in sorted(bounds, key=lambda name: (bounds[name], name)):
        if bounds[name] > margin * min((c.time_s for c in contenders if not c.is_baseline), default=inf):
            break
        measured = [m for m in measurements if m.micro_config.algorithm == name]
        divided = [m for m in measured if m.micro_config.micro_batch_size < batch_size]
        undivided = [m for m in measured if m.micro_config.micro_batch_size == batch_size]
        for sizes in (measured, divided, undivided):
            contenders = contenders | fastest_within(sizes, batch_size, limit_bytes)
    ranked = sorted(contenders, key=lambda c: (c.time_s, c.workspace_bytes, c.micro_configs))
    tuned = [c for c in ranked if not c.is_baseline]
    return [c for c in tuned if c.time_s <= margin * tuned[0].time_s] or ranked


def _least_times(measurements: Sequence[Measurement], batch_size: int) -> dict[str, float]:
    """Return a lower bound in seconds by algorithm: best time per sample times batch size, without setup."""
    least: dict[str, float] = {}
    for m in measurements:
        name, n = m.micro_config.algorithm, m.micro_config.micro_batch_size
        if n <= batch_size:
            least[name] = min(m.step_s / n * batch_size, least.get(name, inf))
    return least


def fastest_within(measurements: Sequence[Measurement], batch_size: int, limit_bytes: int | None) -> set[Configuration]:
    """Return a set with the configuration predicted to be fastest within the limit; empty if none fits."""
    fastest = desirable_sets(measurements, batch_size).fastest(batch_size, limit_bytes) if measurements else None
    return set() if fastest is None else {fastest}


def best_of(runs: Mapping[Configuration, Comparison], measurements: Sequence[Measurement]) -> Configuration:
    """Return the configuration with the fastest whole run, or an equally fast one with fewer micro-batches.

    An equally fast configuration with at most half the error is preferred, since the least accurate layers determine
    the error of a network. If the error is many times that of torch's own, so is one that is about equally fast.
    """
    highest = max(run.speedup for run in runs.values())
    equal = (configuration for configuration, run in runs.items() if run.speedup >= highest / _EVEN)
    best = min(equal, key=lambda c: (len(c.micro_configs), -runs[c].speedup))
    errors = {c: relative_error_of(c, measurements) or 0.0 for c in runs}
    torchs = next((m.relative_error for m in measurements if m.micro_config.algorithm == TORCHS_OWN), inf)
    even = JUST_AS_FAST if errors[best] > _COARSE * torchs else _EVEN
    finer = [c for c, run in runs.items() if errors[c] <= errors[best] / 2 and run.speedup >= highest / even]
    return max(finer, key=lambda c: runs[c].speedup, default=best)
