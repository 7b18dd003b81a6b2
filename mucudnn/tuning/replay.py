"""Replay: the choices that ``tune`` would make from stored measurements, without a device and without measuring."""

from __future__ import annotations

from collections.abc import Sequence

from mucudnn.core.config import Config
from mucudnn.core.records import Task
from mucudnn.solver.division import Division
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
