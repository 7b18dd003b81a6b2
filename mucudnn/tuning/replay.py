"""Replay: the choices that ``tune`` would make from stored measurements, without a device and without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.records import Task
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.solver.division import Division
from mucudnn.solver.reuse import micro_batch_sizes
from mucudnn.store.selection import SelectedMeasurements
from mucudnn.tuning.choose import choose, is_solvable
from mucudnn.tuning.divide import divide
from mucudnn.tuning.feasible import infeasible, smallest_bytes
from mucudnn.tuning.job import Job
from mucudnn.tuning.result import Tuning


def replay(tasks: Sequence[Task], config: Config, stored: SelectedMeasurements) -> Tuning:
    """Make the choices of ``tune_tasks`` from stored results only, with predictions in place of missing whole runs.

    With the stored results and the config of a tuning, the choices are the same as in that tuning.

    Raises ``InfeasibleError`` if no configuration fits, naming the tasks and the smallest sufficient workspace.
    """

    jobs = []
    for task in tasks:
        results = {m.micro_config: m for m in stored.measurements[task]}
        bound = config.error_bound(task.problem.dtype, stored.environment.numerics)
        jobs.append(Job(task, bound, (), (), {**results}, outcomes={**stored.whole_runs[task]}, is_own=False))
    division: Division[Task] | None = None
    if config.workspace_budget_bytes is not None:
        choices, division = divide(jobs, config.workspace_budget_bytes)
    else:
        without = [job for job in jobs if not is_solvable(job.task, job.allowed())]
        if without:
            raise infeasible({job.task: smallest_bytes(job.allowed(), job.task.batch_size) for job in without})
        choices = {job.task: choose(job) for job in jobs}
    problems = [choices[job.task].knowing(job.measurements(), error_bound=job.error_bound) for job in jobs]
    return Tuning(config, stored.environment, tuple(problems), division)


def shortcomings(tasks: Sequence[Task], stored: SelectedMeasurements, policy: BatchSizePolicy) -> tuple[str, ...]:
    """Return what the measurements lack: PyTorch's own undivided, and larger micro-batches of the fastest algorithm."""
    from mucudnn.kernels.registry import algorithms

    known = {one.name: one for one in algorithms(stored.environment.device_type) if not one.is_torchs_own}
    without_baseline, without_larger = 0, 0
    for task in tasks:
        measured = {m.micro_config: m for m in stored.measurements[task]}
        without_baseline += task.baseline not in measured
        ours = [of for of in measured if of.algorithm in known]
        if ours:
            fastest = min(ours, key=lambda of: measured[of].step_s / of.micro_batch_size)
            sizes = [of.micro_batch_size for of in ours if of.algorithm == fastest.algorithm]
            larger = [size for size in micro_batch_sizes(policy, task.batch_size) if size > max(sizes)]
            limit = inf if task.limit_bytes is None else task.limit_bytes
            without_larger += any(_needed_bytes(known[fastest.algorithm], task, size) <= limit for size in larger)
    return tuple(
        f"{count} of {len(tasks)} convolutions: {what}; mucudnn tune without --stored measures what may be faster"
        for count, what in (
            (without_baseline, "PyTorch's own undivided was not measured at this batch size"),
            (without_larger, "the fastest algorithm was not measured in larger micro-batches, which fit this limit"),
        )
        if count
    )


def _needed_bytes(algorithm: Algorithm, task: Task, micro_batch_size: int) -> float:
    if algorithm.supports_micro_batch(task.problem, micro_batch_size) is not None:
        return inf
    workspace = algorithm.workspace(task.problem, micro_batch_size)
    return workspace.prepared_bytes + workspace.scratch_bytes
