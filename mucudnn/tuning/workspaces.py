"""Tuning under a workspace limit for each convolution (WR) or one budget for all (WD).

The method is that of Oyama et al., 2018, sections III-B and III-C.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from mucudnn.core.records import Configuration, Task
from mucudnn.tuning.benchmarker import Benchmarker
from mucudnn.tuning.choose import JUST_AS_FAST, NEARLY_AS_FAST, choose
from mucudnn.tuning.divide import divide
from mucudnn.tuning.infeasible import infeasible, smallest_bytes, unaffordable
from mucudnn.tuning.job import Job
from mucudnn.tuning.result import Tuning


def tune_each(benchmarker: Benchmarker, jobs: Sequence[Job]) -> Tuning:
    """Measure and choose task by task; with several ranks, choose again from all results, so that the ranks agree.

    Raises ``InfeasibleError``, which names all tasks without a configuration within their workspace limit.
    """
    for job in jobs:
        if not job.is_feasible():
            job.forget_failures()
    _require_feasible(jobs)  # before minutes are spent on measuring
    own = benchmarker.ranks.own(jobs, benchmarker.expected_cost)
    for number, job in enumerate(own):
        benchmarker.measure(job, job.task.limit_bytes, number / len(own), 1 / len(own))
        if job.is_feasible():
            _choose_one(benchmarker, job)
    if benchmarker.ranks.are_several:
        benchmarker.ranks.exchange(jobs)
        benchmarker.ready.clear()
        for job in jobs:
            if job.is_feasible():
                _choose_one(benchmarker, job)
    _require_feasible([job for job in jobs if job.choice is None])
    return benchmarker.tuning()


def _choose_one(benchmarker: Benchmarker, job: Job) -> None:
    margin = NEARLY_AS_FAST if benchmarker.config.thorough else JUST_AS_FAST
    job.choice = choose(job.task, job.allowed(), benchmarker.verifier([job]), job.declared_bytes, margin)
    benchmarker.ready.append(job.tuned(job.choice, benchmarker.runs(job.task)))


def _require_feasible(jobs: Sequence[Job]) -> None:
    without = [job for job in jobs if not job.is_feasible()]
    if without:
        needed = {job.task: job.smallest_feasible_bytes() for job in without}
        raise infeasible(needed, {job.task: job.failed_candidates() for job in without})


def tune_together(benchmarker: Benchmarker, jobs: Sequence[Job]) -> Tuning:
    """Measure all tasks, divide the budget among them, and time complete calls of the chosen configurations.

    Raises ``InfeasibleError`` if the budget is less than the smallest configurations need together.
    """
    budget, ranks = benchmarker.config.workspace_budget_bytes, benchmarker.ranks
    if not _is_affordable(jobs, budget):
        for job in jobs:
            job.forget_failures()
    _require_affordable(jobs, budget)  # before minutes are spent on measuring
    own = ranks.own(jobs, benchmarker.expected_cost)
    _measure(benchmarker, own, budget)
    ranks.exchange(jobs)
    if not ranks.everywhere(_is_divisible(jobs, budget)):
        _measure(benchmarker, own, budget, thoroughly=True)
        ranks.exchange(jobs)
    _require_affordable(jobs, budget)  # now that some candidates may have failed
    divided = divide(
        {job.task: job.allowed() for job in jobs},
        budget,
        benchmarker.verifier(jobs),
        {job.task: job.declared_bytes for job in jobs},
        partial(_run_ahead, benchmarker, jobs),
    )
    benchmarker.ready += [job.tuned(divided.choices[job.task], benchmarker.runs(job.task)) for job in jobs]
    return replace(benchmarker.tuning(), divided=divided)


def _measure(benchmarker: Benchmarker, jobs: Sequence[Job], budget: int | None, *, thoroughly: bool = False) -> None:
    for number, job in enumerate(jobs):
        benchmarker.measure(job, budget, number / len(jobs), 1 / len(jobs), thoroughly=thoroughly)


def _run_ahead(benchmarker: Benchmarker, jobs: Sequence[Job], wanted: Mapping[Task, Sequence[Configuration]]) -> None:
    """Prefetch whole runs: each rank makes those of its own jobs, then all ranks exchange them."""
    if benchmarker.ranks.are_several:
        for job in jobs:
            if job.is_own:
                benchmarker.outcomes(job, wanted.get(job.task, ()))
        benchmarker.ranks.exchange(jobs)


def _is_affordable(jobs: Sequence[Job], budget: int | None) -> bool:
    """Whether the budget is enough for the smallest configurations of all jobs; check smallest micro-batches first."""
    each = (Job.bytes_in_smallest_pieces, Job.smallest_feasible_bytes)
    return any(_fit(map(smallest, jobs), budget) for smallest in each)


def _is_divisible(jobs: Sequence[Job], budget: int | None) -> bool:
    """Whether measured configurations fit the budget, although the quick race may have skipped the smallest ones."""
    return _fit((smallest_bytes(job.allowed(), job.task.batch_size) for job in jobs), budget)


def _fit(sizes: Iterable[int | None], budget: int | None) -> bool:
    """Whether the sum of these sizes in bytes, one per job, is within the budget; false if one is None."""
    if budget is None:
        return True
    total = 0
    for size in sizes:
        if size is None:
            return False
        total += size
    return total <= budget


def _require_affordable(jobs: Sequence[Job], budget: int | None) -> None:
    if not _is_affordable(jobs, budget):
        needed = {job.task: job.smallest_feasible_bytes() for job in jobs}
        raise unaffordable(needed, budget, {job.task: job.failed_candidates() for job in jobs})
