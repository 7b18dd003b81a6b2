"""``tune``: for each task its candidates, their race, and the choice, or a division of one budget among all tasks.

The method is that of Oyama et al., 2018: workspace reuse (section III-B) and workspace division (section III-C).
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config, config_or_default, without_cache_budget
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MOST_ELEMENTS, ConvProblem, Operation
from mucudnn.core.records import Failure, Measurement, MicroConfig, Task
from mucudnn.core.team import ALONE, Team
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.torch_settings import deterministic_torch
from mucudnn.core.values import instance, several, shown, whole
from mucudnn.measuring.candidates import Candidate, count_once
from mucudnn.measuring.clocks import peak_flops_per_s
from mucudnn.measuring.heap import kept_heap
from mucudnn.measuring.quiet import MOST_WAITED_S, Quiet, undisturbed
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.devices import device_named, made_current
from mucudnn.running.dispatcher import untouched
from mucudnn.running.problems import largest_batch_size
from mucudnn.store.database import Database
from mucudnn.store.tuning_store import EnvironmentStore
from mucudnn.tuning.choose import choose, is_solvable, refuted
from mucudnn.tuning.feasible import (
    count_smallest,
    count_until_affordable,
    count_until_feasible,
    is_divisible,
    require_affordable,
    require_feasible,
)
from mucudnn.tuning.job import Context, Job, Priors, exchange, expected_s, job_of, permitted_algorithms
from mucudnn.tuning.prior import Prior
from mucudnn.tuning.race import Race
from mucudnn.tuning.result import Tuning, TuningInterrupted
from mucudnn.tuning.standings import Standings, failures_within

if TYPE_CHECKING:
    from mucudnn.solver.division import Division

__all__ = ["Priors", "Progress", "TunedProblem", "Tuning", "TuningInterrupted", "tune", "tune_tasks"]

_MOST_ATTEMPTS = 4  # to measure what fits a budget: in a race, all that fits, and twice only what needs the least bytes
_SOFT = 1  # omp_pause_soft; GNU's runtime ends the threads, others survive a fork and need not
_RACED = 2 / 3  # of the time limit; whole runs, and what a candidate takes beyond the limit, have the rest


@contextmanager
def openmp_threads_ended() -> Iterator[None]:
    """End the OpenMP threads of this thread after the block: a process that is forked while they are there may hang."""
    try:
        yield
    finally:
        with suppress(AttributeError):  # the runtime is older than OpenMP 5
            ctypes.CDLL(None).omp_pause_resource_all(_SOFT)


@openmp_threads_ended()
def tune(
    problems: Iterable[ConvProblem] | ConvProblem,
    batch_size: int,
    config: Config | None = None,
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    names: Mapping[ConvProblem, str] | None = None,
    database: Database | None = None,
    machine: Machine | None = None,
    process_group: ProcessGroup | None = None,
) -> Tuning:
    """Choose the fastest configuration of each problem within the workspace limit, and verify it against torch.

    With ``config.workspace_budget``, a budget is divided over all problems instead. Problems whose operation is not in
    ``config.operations`` are skipped. Stored results are not measured again; each new measurement is stored at once.

    device: ``"cpu"``, ``"cuda"`` (the current GPU), a GPU by its number such as ``"cuda:1"``, or a ``torch.device``.
    progress: called with a description of the current work and the fraction that is done.
    names: names of problems for progress and errors.
    database: replaces the config's file.
    machine: replaces this machine.

    In an initialized ``torch.distributed`` process group, all ranks must call it with the same problems: each measures
    its share, and all make the same choices. With ``Config(share_tuning=False)`` each rank tunes for itself.

    process_group: replaces the default group.

    Raises ``InfeasibleError`` (naming the smallest limit of every problem that has no configuration, or the smallest
    budget), ``InvalidInputError`` for invalid arguments, an unknown algorithm, or a batch that is too large,
    ``UnavailableError`` for a missing device, ``DatabaseError`` for a file that cannot be read (if it cannot be written
    there is a warning instead), ``BrokenDeviceError`` if a candidate leaves the GPU unusable for this process (the next
    process skips it), ``SharingError`` if ranks differ or one of them is lost, and ``TuningInterrupted`` on Ctrl-C,
    with the finished problems.
    """
    config, place = without_cache_budget(config_or_default(config)), device_named(device)
    names = instance(Mapping, {} if names is None else names, "names")  # type: ignore[type-abstract]
    samples, limit = whole(batch_size, "batch_size", 1), config.workspace_limit_bytes
    wanted = dict.fromkeys(instance(ConvProblem, problem, "one of problems") for problem in several(problems))
    is_exempt = config.baseline_exempt
    tasks = [
        Task(problem, samples, limit, name=names.get(problem, ""), baseline_exempt=is_exempt)
        for problem in wanted
        if problem.operation in config.operations
    ]
    team = team_of(process_group) if config.share_tuning else ALONE
    with made_current(place):
        return tune_tasks(
            tasks, config, device=place.type, progress=progress, database=database, machine=machine, team=team
        )


def team_of(group: ProcessGroup | None = None) -> Team:
    """Return the ranks of a process group, by default of the default group; this process alone if there is none.

    Raises ``InvalidInputError`` if this process is not in the group.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return ALONE
    from mucudnn.distributed.ranks import ranks_of  # only needed in process groups

    return ranks_of(group)


def tune_tasks(
    tasks: Sequence[Task],
    config: Config,
    *,
    device: str = "cpu",
    progress: Progress | None = None,
    database: Database | None = None,
    machine: Machine | None = None,
    priors: Priors | None = None,
    in_passing: bool = False,
    team: Team = ALONE,
) -> Tuning:
    """Tune tasks of any batch sizes, limits and counts, as ``tune`` does; the result has their order.

    priors: cache of expected times from earlier calls, which is updated; reading them from the database is slow.
    in_passing: whether tuning happens inside a user's call, so that it waits neither for a quiet machine nor for the
    proving process, without which foreign code is not measured, and does not warn of a busy machine.
    team: the ranks that tune together; it is closed at the end of this call.
    """
    if not (progress is None or callable(progress)):
        raise InvalidInputError(f"progress is {shown(progress)}; give a function of a text and a fraction, or None")
    if database is not None:
        instance(Database, database, "database")  # a path belongs in the config
    if machine is not None:
        instance(Machine, machine, "machine")
    with ExitStack() as stack:
        # The surroundings: errors go to all ranks, torch's kernels are its own, and the heap is as in use.
        as_in_use = nullcontext() if config.keep_heap is False else kept_heap()
        for around in (team.propagate_errors(), untouched, as_in_use):
            stack.enter_context(around)
        on, opened = stack.enter_context(machine_and_database(config, device, machine, database))
        for task in tasks:
            largest = largest_batch_size(task.problem, on.device)
            if task.batch_size > largest:
                raise InvalidInputError(
                    f"{task}: batch_size is {task.batch_size}; it must be at most {largest} on device {on.device!r}, "
                    f"so that x and y have at most {MOST_ELEMENTS} elements"
                )
        # What the steps share, with the results of all ranks.
        tell = progress or silent
        quiet = Quiet(on.watch, tell, 0.0 if in_passing else MOST_WAITED_S)
        versions = {algorithm.name: algorithm.version for algorithm in permitted_algorithms(on, config)}
        shared = None
        if team.are_several:
            from mucudnn.tuning.sharing import sharing  # only needed with several ranks

            shared = stack.enter_context(sharing(team, tasks, config, on, opened))
        store = EnvironmentStore(opened if shared is None else shared.known, on.environment)
        context = Context(
            config, on, store, quiet, tell, {} if priors is None else priors, shared, versions, in_passing
        )
        # The steps themselves, after which all ranks must have chosen the same.
        tuning = _tune(context, tasks)
        if not in_passing:
            quiet.end()
        tell("done", 1.0)
        if shared is not None:
            shared.agree(tasks, tuning.problems)
        return tuning


@contextmanager
def machine_and_database(
    config: Config, device: str = "cpu", machine: Machine | None = None, database: Database | None = None
) -> Iterator[tuple[Machine, Database]]:
    """Yield the machine and the database: by default the current machine and the config's database file.

    Within the context, torch's determinism is set as in the config, since it is part of the machine's environment.
    """
    with deterministic_torch(asked=config.deterministic), ExitStack() as stack:
        machine = machine or Machine.current(device, config.keep_heap)
        yield machine, stack.enter_context(Database(config.database)) if database is None else database


def _tune(context: Context, tasks: Sequence[Task]) -> Tuning:
    """Find the tasks' candidates, measure them, solve, and verify the choices by whole runs; return the results.

    Stored results are not measured again, but for disturbed ones, if the machine is quiet now, and failures of torch's
    own. A candidate whose failure is stored is left out, unless nothing else fits a limit. Ctrl-C keeps the finished
    problems.
    """
    config, machine = context.config, context.machine
    division = None
    try:
        jobs = [job_of(context, task) for task in tasks]
        if machine.prover is not None and any(job.task.baseline not in job.results for job in jobs):
            machine.prover.start(waits=not context.in_passing)
            machine.watch.forget()
        if config.workspace_budget_bytes is None:
            _tune_each(context, jobs)
        else:
            division = _tune_together(context, jobs, config.workspace_budget_bytes)
    except KeyboardInterrupt:
        raise TuningInterrupted(Tuning(config, machine.environment, tuple(context.ready))) from None
    machine.clock.rest()
    if machine.prover is not None:
        machine.prover.rest()  # it frees its memory
    return Tuning(config, machine.environment, tuple(context.ready), division)


def _tune_each(context: Context, jobs: Sequence[Job]) -> None:
    """Measure and choose task by task; with several ranks, choose again from all results, so that the ranks agree.

    Raises ``InfeasibleError``, which names all tasks without a configuration within their workspace limit.
    """
    for job in jobs:
        context.progress(f"{job.task}: counting bytes", 0.0)
        if not count_until_feasible(job):
            job.forget_failures()
    require_feasible(jobs)  # before minutes are spent on measuring
    jobs_here = _own(context, jobs)
    for number, job in enumerate(jobs_here):
        _measure(context, job, job.task.limit_bytes, number / len(jobs_here), 1 / len(jobs_here))
        if count_until_feasible(job):
            job.choice = choose(job, context)
            context.ready.append(_tuned(context, job, job.choice))
    if context.ranks is not None:
        exchange(jobs, context.ranks)
        context.ready.clear()
        for job in jobs:
            if count_until_feasible(job):
                job.choice = choose(job, context)
                context.ready.append(_tuned(context, job, job.choice))
    require_feasible([job for job in jobs if job.choice is None])


def _tune_together(context: Context, jobs: Sequence[Job], budget_bytes: int) -> Division[Task]:
    """Measure all tasks, divide the budget among them, and time complete calls of the chosen configurations.

    Raises ``InfeasibleError`` if the budget is less than the smallest configurations need together.
    """
    from mucudnn.tuning.divide import divide  # only needed with a budget

    context.progress("counting bytes", 0.0)
    if not count_until_affordable(jobs, budget_bytes):
        for job in jobs:
            job.forget_failures()
    require_affordable(jobs, budget_bytes)  # before minutes are spent on measuring
    jobs_here, ranks = _own(context, jobs), context.ranks
    for attempt in range(_MOST_ATTEMPTS):
        for number, job in enumerate(jobs_here):
            # A race measures one candidate within its limit, even if there is no time left.
            limit = budget_bytes if attempt < 2 else count_smallest(job)
            start, share = number / len(jobs_here), 1 / len(jobs_here)
            _measure(context, job, limit, start, share, is_all_wanted=attempt == 1)
        if ranks is not None:
            exchange(jobs, ranks)
        is_enough = is_divisible(jobs, budget_bytes)
        if is_enough if ranks is None else ranks.team.everywhere(holds=is_enough):
            break
        require_affordable(jobs, budget_bytes)  # now that some candidates may have failed
    choices, division = divide(jobs, budget_bytes, context)
    context.ready += [_tuned(context, job, choices[job.task]) for job in jobs]
    return division


def _own(context: Context, jobs: Sequence[Job]) -> Sequence[Job]:
    """Return the jobs that this rank measures, which is all if it tunes alone.

    The first rank of each kind of device estimates the costs. They are never 0, since whole runs may be needed.
    """
    if context.ranks is None:
        return jobs
    costs = [0.0] * len(jobs)
    if context.ranks.team.is_first:
        budget = context.config.workspace_budget_bytes
        for number, job in enumerate(jobs):
            costs[number] = expected_s(job.task.problem, job.task.batch_size)
            if job.measurements():
                limit = job.task.limit_bytes if budget is None else budget
                missing = _standings(context, job, limit).missing()
                costs[number] *= (1 + len(missing)) / (1 + len(job.candidates))
    own = context.ranks.own([job.task.problem for job in jobs], costs)
    for number, job in enumerate(jobs):
        job.is_own = number in own
    return [job for job in jobs if job.is_own]


def _tuned(context: Context, job: Job, choice: TunedProblem) -> TunedProblem:
    """Return the choice with the measurements and failures of all candidates."""
    measured, barred = job.measurements(), job.barred()
    if barred is not None:
        choice = replace(choice, reason=f"by prediction, since torch's own is barred: {barred.reason}")
    runs = context.store.whole_runs(job.task.problem, context.versions, fresh=job.task.in_headroom)
    return choice.knowing(
        measured,
        job.failures(),
        error_bound=job.error_bound,
        left_out=job.left_out,
        refuted=refuted(replace(job.task, limit_bytes=choice.limit_bytes), measured, runs),
    )


def _measure(
    context: Context,
    job: Job,
    limit_bytes: int | None,
    start: float,
    share: float,
    *,
    is_all_wanted: bool = False,
) -> None:
    """Measure the job's missing candidates within a workspace limit, and store each result at once.

    All candidates race together first. If nothing that was measured fits the limit, each algorithm has a race by
    itself: there it is not hopeless, whatever others or similar problems say, and is measured at all sizes that fit
    and have not failed. After the time limit, such races end with the first answer.

    start, share: begin and length of this job's part of the tuning's progress, from 0 to 1.
    is_all_wanted: whether each algorithm has a race by itself in any case.
    """
    config, machine = context.config, context.machine
    context.quiet.at = start
    tell = share_of(context.progress, start, share)
    tell(f"{job.task}: measuring", 0.0)
    # The time: this problem's part, less what earlier problems took beyond theirs.
    if config.time_limit_s is not None:
        now_s = machine.clock.now()
        context.due_s = config.time_limit_s + (now_s if context.due_s is None else context.due_s)
        context.race_ends_s = now_s + _RACED * max(0.0, min(config.time_limit_s, context.due_s - now_s))
    # The races.
    with ExitStack() as measuring:
        for source in machine.sources:
            measuring.enter_context(source.measuring())
        _race_in_quiet(context, job, limit_bytes, job.candidates, tell)
        if is_all_wanted or not _is_solvable(job, limit_bytes):
            _race_by_algorithm(context, job, limit_bytes, tell)
    # What stays unknown: the time of torch's own, of which bytes are counted at least, and what there was no time for.
    job.declared_bytes = None
    if job.barred() is None and not isinstance(job.results.get(job.task.baseline), Measurement):
        baseline = next(c for c in job.candidates if c.micro_config == job.task.baseline)
        job.counted.pop(baseline.micro_config, None)  # an earlier run may have lacked memory
        scratch_bytes = count_once(baseline, job.counted)
        if scratch_bytes is not None:
            job.declared_bytes = baseline.workspace.prepared_bytes + scratch_bytes
    if config.time_limit_s is not None:
        left_out = _standings(context, job, config.workspace_budget_bytes or limit_bytes).missing()
        job.left_out = tuple(candidate.micro_config for candidate in left_out)


def _is_solvable(job: Job, limit_bytes: int | None) -> bool:
    """Return whether what was measured has a configuration within the limit."""
    may_run = job.barred() is None  # torch's own must not run if it is barred
    task = replace(
        job.task,
        limit_bytes=limit_bytes,
        baseline_exempt=job.task.baseline_exempt and may_run,
        in_headroom=job.task.in_headroom and may_run,
    )
    return is_solvable(task, job.allowed())


def _race_by_algorithm(context: Context, job: Job, limit_bytes: int | None, tell: Progress) -> None:
    """Run a race of each algorithm by itself; after the time limit, until there is an answer."""
    failed = {failure.micro_config for failure in job.failures() if not failure.is_passed_over}
    passed_over = {failure.micro_config for failure in job.failures()} - failed
    for name in dict.fromkeys(c.algorithm.name for c in job.candidates):
        is_late = context.race_ends_s is not None and context.machine.clock.now() > context.race_ends_s
        if is_late and _is_solvable(job, limit_bytes):
            return
        candidates = [c for c in job.candidates if c.algorithm.name == name and c.micro_config not in failed]
        _race_in_quiet(context, job, limit_bytes, candidates, tell, without=passed_over, prior=Prior())


def _race_in_quiet(
    context: Context,
    job: Job,
    limit_bytes: int | None,
    candidates: Sequence[Candidate],
    tell: Progress,
    *,
    without: Collection[MicroConfig] = (),
    prior: Prior | None = None,
) -> None:
    """Run a race of candidates on a quiet machine, and another one of what was disturbed, if it is quiet after that.

    without, prior: as in ``_standings``.
    """
    standings = _standings(context, job, limit_bytes, candidates, without=without, prior=prior)
    if standings.is_complete():
        return
    context.quiet.wait()
    results = _race(context, job, standings, tell)
    sound = undisturbed([*results.values()])
    if len(sound) < len(results) and context.quiet.wait().is_quiet:
        for micro_config in results:  # only results that may still win matter
            context.quiet.remember(job.task.problem, micro_config, None)
        doubtful = results.keys() - {result.micro_config for result in sound}
        _race(context, job, _standings(context, job, limit_bytes, candidates, without=doubtful, prior=prior), tell)


def _race(context: Context, job: Job, standings: Standings, tell: Progress) -> dict[MicroConfig, Measurement | Failure]:
    """Run a race, store each result at once, and return them all."""
    left_s = None if context.race_ends_s is None else max(0.0, context.race_ends_s - context.machine.clock.now())

    def say(text: str) -> None:
        done = sum(candidate.micro_config in job.results for candidate in job.candidates)
        tell(f"{job.task}: {text}", done / len(job.candidates))

    results: dict[MicroConfig, Measurement | Failure] = {}
    for result in Race(standings, context.machine, left_s, say).measure():
        micro_config, load = result.micro_config, result.load if isinstance(result, Measurement) else None
        results[micro_config] = job.results[micro_config] = result
        context.store.add(job.task.problem, context.versions[micro_config.algorithm], result)
        context.quiet.remember(job.task.problem, micro_config, load)
        say(f"{micro_config.algorithm} {micro_config.micro_batch_size}")
    return results


def _standings(
    context: Context,
    job: Job,
    limit_bytes: int | None,
    candidates: Sequence[Candidate] | None = None,
    *,
    without: Collection[MicroConfig] = (),
    prior: Prior | None = None,
) -> Standings:
    """Return the standings of candidates, by default all of the job's, from the job's results so far.

    limit_bytes: workspace limit.
    without: micro-configs whose results are left out.
    prior: expected times; by default those from all measurements of this machine.
    """
    config, problem = context.config, job.task.problem
    failures = [f for f in job.failures() if f.micro_config not in without]
    return Standings(
        task=replace(job.task, limit_bytes=limit_bytes),
        candidates=job.candidates if candidates is None else candidates,
        max_relative_error=job.error_bound,
        may_keep=problem.operation is Operation.FORWARD and config.cache_budget_bytes != 0,
        prior=context.prior() if prior is None else prior,
        every_size=config.workspace_budget_bytes is not None,
        flops_per_s=partial(peak_flops_per_s, context.machine.device, problem.dtype),
        known={m.micro_config: m for m in job.measurements() if m.micro_config not in without},
        failed=failures_within(failures, limit_bytes),
        counted=job.counted,
    )
