"""Workspace reuse (WR): each task under a limit of its own (Oyama et al., 2018, section III-B)."""

from __future__ import annotations

from collections.abc import Sequence

from mucudnn.tuning.benchmarker import Benchmarker
from mucudnn.tuning.choose import JUST_AS_FAST, NEARLY_AS_FAST, choose
from mucudnn.tuning.infeasible import infeasible
from mucudnn.tuning.job import Job
from mucudnn.tuning.result import Tuning


def tune_each(benchmarker: Benchmarker, jobs: Sequence[Job]) -> Tuning:
    """Measure and choose, task by task; then once more from what all ranks have measured, so that all choose the same.

    Raises ``InfeasibleError`` for all tasks that nothing fits.
    """
    for job in jobs:
        if not job.is_feasible():
            job.forget_failures()
    _require_feasible(jobs)  # before minutes are spent on measuring
    own = benchmarker.ranks.own(jobs, benchmarker.expected_cost)
    for number, job in enumerate(own):
        benchmarker.measure(job, job.task.limit_bytes, number / len(own), 1 / len(own))
        if job.is_feasible():
            _choose(benchmarker, job)
    if benchmarker.ranks.are_several:
        benchmarker.ranks.exchange(jobs)
        benchmarker.ready.clear()
        for job in jobs:
            if job.is_feasible():
                _choose(benchmarker, job)
    _require_feasible([job for job in jobs if job.choice is None])
    return benchmarker.tuning()


def _choose(benchmarker: Benchmarker, job: Job) -> None:
    margin = NEARLY_AS_FAST if benchmarker.config.thorough else JUST_AS_FAST
    job.choice = choose(job.task, job.allowed(), benchmarker.verifier([job]), job.declared_bytes, margin)
    benchmarker.ready.append(job.tuned(job.choice, benchmarker.runs(job.task)))


def _require_feasible(jobs: Sequence[Job]) -> None:
    without = [job for job in jobs if not job.is_feasible()]
    if without:
        needed = {job.task: job.smallest_feasible_bytes() for job in without}
        raise infeasible(needed, {job.task: job.failed_candidates() for job in without})
