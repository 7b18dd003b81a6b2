"""Whether tasks have configurations within their workspace limit or budget, and the errors if they have none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from mucudnn.core.errors import InfeasibleError
from mucudnn.core.records import Failure, Measurement, Task, source_of
from mucudnn.core.values import exact_bytes, format_bytes
from mucudnn.measuring.candidates import Candidate, by_cost_of_counting, count_once
from mucudnn.solver.front import desirable_sets
from mucudnn.tuning.job import Job

_Failed = Mapping[Task, Sequence[Failure]]
_NEEDS_NOTHING = "allow the algorithm loop-nest, which needs no workspace (compiled, on the CPU)"


def smallest_bytes(measurements: Sequence[Measurement], batch_size: int) -> int | None:
    """Return the smallest workspace of a configuration of these measurements; None if none covers the batch."""
    smallest = desirable_sets(measurements, batch_size).smallest(batch_size) if measurements else None
    return None if smallest is None else smallest.workspace_bytes


def count_until_feasible(job: Job) -> bool:
    """Return whether a configuration fits the job's limit, for which candidates' bytes are counted until one does.

    Those that cost least to count come first. What cannot fit by its declaration is never counted.
    """
    if job.is_chosen is not None:
        return job.is_chosen
    task = job.task
    if (task.in_headroom or task.baseline_exempt) and job.barred() is None:
        return True
    limit = inf if task.limit_bytes is None else task.limit_bytes
    usable = [c for c in _usable(job) if c.handed_bytes <= limit]
    asked: list[Candidate] = []
    for group in by_cost_of_counting(usable, task.baseline):
        asked += group
        smallest = _count_smallest(job, asked)
        if smallest is not None and smallest <= limit:
            return True
    return False


def require_feasible(jobs: Sequence[Job]) -> None:
    """Raise ``InfeasibleError`` if no configuration fits a job's limit, naming all such tasks."""
    without = [job for job in jobs if not count_until_feasible(job)]
    if without:
        needed = {job.task: count_smallest(job) for job in without}
        raise infeasible(needed, {job.task: _failed_candidates(job) for job in without})


def count_until_affordable(jobs: Sequence[Job], budget_bytes: int | None) -> bool:
    """Return whether the budget is enough for the smallest configurations of all jobs, for which bytes are counted.

    Configurations of the smallest micro-batches only are tried first, since they take few runs.
    """
    in_pieces = (count_smallest(job, smallest_pieces=True) for job in jobs)
    return _fit(in_pieces, budget_bytes) or _fit(map(count_smallest, jobs), budget_bytes)


def is_divisible(jobs: Sequence[Job], budget_bytes: int | None) -> bool:
    """Whether measured configurations fit the budget, although the quick race may have skipped the smallest ones."""
    return _fit((smallest_bytes(job.allowed(), job.task.batch_size) for job in jobs), budget_bytes)


def _fit(sizes: Iterable[int | None], budget_bytes: int | None) -> bool:
    """Whether the sum of these sizes in bytes, one per job, is within the budget; false if one is None."""
    if budget_bytes is None:
        return True
    total = 0
    for size in sizes:
        if size is None:
            return False
        total += size
    return total <= budget_bytes


def require_affordable(jobs: Sequence[Job], budget_bytes: int | None) -> None:
    """Raise ``InfeasibleError`` if the budget is less than the smallest configurations of all jobs need."""
    if not count_until_affordable(jobs, budget_bytes):
        needed = {job.task: count_smallest(job) for job in jobs}
        raise unaffordable(needed, budget_bytes, {job.task: _failed_candidates(job) for job in jobs})


def _usable(job: Job) -> list[Candidate]:
    """Return the candidates without failures or excessive errors.

    Torch's own counts even if it failed for lack of memory, since running takes less memory than measuring.
    """
    permitted = {m.micro_config.algorithm for m in job.allowed()}
    barred = {m.micro_config.algorithm for m in job.measurements()} - permitted
    lasting = [f for f in job.failures() if f.is_lasting or f.micro_config != job.task.baseline]
    failed = {f.micro_config for f in lasting if not f.is_passed_over}
    return [c for c in job.candidates if c.algorithm.name not in barred and c.micro_config not in failed]


def count_smallest(job: Job, *, smallest_pieces: bool = False) -> int | None:
    """Return the smallest workspace of a configuration of usable candidates, or of their smallest sizes only."""
    usable = _usable(job)
    least = min((c.micro_batch_size for c in usable), default=0)
    return _count_smallest(job, [c for c in usable if c.micro_batch_size == least or not smallest_pieces])


def _count_smallest(job: Job, candidates: Sequence[Candidate]) -> int | None:
    """Return the smallest workspace of a configuration of the candidates, whose bytes are counted."""
    counted = [(c, count_once(c, job.counted)) for c in candidates]
    sizes = [c.at_any_time(scratch_bytes) for c, scratch_bytes in counted if scratch_bytes is not None]
    return smallest_bytes(sizes, job.task.batch_size)


def _failed_candidates(job: Job) -> list[Failure]:
    """Return the failures of candidates that ran, without unsupported and skipped ones."""
    results = (job.results.get(candidate.micro_config) for candidate in job.candidates)
    return [result for result in results if isinstance(result, Failure) and not result.is_passed_over]


def infeasible(smallest: Mapping[Task, int | None], failed: _Failed | None = None) -> InfeasibleError:
    """Return one error for all tasks that have no configuration within their limit, with their smallest workspaces.

    failed: the failures of each task's candidates, which the smallest workspaces ignore.
    """
    lines = []
    for task, needed in smallest.items():
        where = f"{task}, batch {task.batch_size}, limit {format_bytes(task.limit_bytes)}"
        lines.append(f"  {where}: {_at_least(needed)}{_but_for(task, failed)}")
    sizes = [size for size in smallest.values() if size is not None]
    largest = max(sizes) if len(sizes) == len(smallest) else None
    return _error("no configuration fits the workspace limit:", lines, "limit", largest)


def unaffordable(
    smallest: Mapping[Task, int | None], budget_bytes: int | None, failed: _Failed | None = None
) -> InfeasibleError:
    """Return one error for a budget too small for all tasks together, with the most demanding tasks first.

    failed: as for ``infeasible``.
    """
    lines = []
    for task, needed in sorted(smallest.items(), key=lambda pair: -(inf if pair[1] is None else pair[1])):
        if needed != 0:
            lines.append(f"  {task}, batch {task.batch_size}: {_at_least(needed)}{_but_for(task, failed)}")
    sizes = [size for size in smallest.values() if size is not None]
    total = sum(sizes) if len(sizes) == len(smallest) else None
    summary = f"no division fits the workspace budget of {format_bytes(budget_bytes)} over {len(smallest)} problems:"
    return _error(summary, lines, "budget", total)


def _error(summary: str, lines: Sequence[str], bound: str, least: int | None) -> InfeasibleError:
    """Return the error with its lines and the remedy.

    bound: limit or budget.
    least: what the bound has to be; None if no bound helps.
    """
    advice = _NEEDS_NOTHING[0].upper() + _NEEDS_NOTHING[1:]
    if least is not None:
        advice = f"Raise the workspace {bound} to {exact_bytes(least)} or more, or {_NEEDS_NOTHING}"
    return InfeasibleError("\n".join((summary, *lines, advice)), least)


def _but_for(task: Task, failed: _Failed | None) -> str:
    """List a task's failed candidates, only the smallest of each algorithm, since larger ones fail likewise.

    Stored failures of algorithms from an ``AlgorithmSource`` are not retried.
    """
    failures = sorted((failed or {}).get(task, ()), key=lambda failure: failure.micro_config, reverse=True)
    first = {failure.micro_config.algorithm: failure for failure in failures}
    names = sorted(first)
    lines = [f"    {name} {first[name].micro_config.micro_batch_size} failed: {first[name].reason}" for name in names]
    if any(source_of(name) != name for name in names):
        lines.append("    stored failures are not tried again; Config(database=...) with a new file tries all")
    return "".join(f"\n{line}" for line in lines)


def _at_least(needed: int | None) -> str:
    return "no algorithm can compute it" if needed is None else f"at least {exact_bytes(needed)}"
