"""Replay: the choices that ``tune`` would make from stored measurements, without a device and without measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Protocol

from mucudnn.running.environment import Environment
from mucudnn.tuning.choose import Outcome, choose
from mucudnn.tuning.divide import Divided, divide
from mucudnn.tuning.infeasible import infeasible, smallest_bytes
from mucudnn.tuning.result import TunedProblem, Tuning, allowed
from mucudnn.words.config import Config
from mucudnn.words.results import Configuration, Measurement, WholeRun
from mucudnn.words.task import Task


class Stored(Protocol):
    """Source of the stored measurements and whole runs of one environment (a machine with its settings)."""

    @property
    def environment(self) -> Environment:
        """The environment in which the measurements were made."""

    def measurements(self, task: Task) -> Sequence[Measurement]:
        """Return the stored measurements of the task's micro-batch sizes, which cover its mini-batch."""

    def whole_run(self, task: Task, configuration: Configuration) -> WholeRun | None:
        """Return the stored whole run of this configuration under the task's conditions; None if there is none."""


def replay(tasks: Sequence[Task], config: Config, stored: Stored) -> Tuning:
    """Make the choices of ``tune_tasks`` from stored results only, with predictions in place of missing whole runs.

    With the stored results and the config of a tuning, the choices are the same as in that tuning.

    Raises ``InfeasibleError`` if no configuration fits, naming the tasks and the smallest sufficient workspace.
    """

    def look_up(task: Task, configurations: Sequence[Configuration]) -> dict[Configuration, Outcome]:
        return {c: stored.whole_run(task, c) for c in configurations}

    measured = {task: stored.measurements(task) for task in tasks}
    bounds = {task: config.error_bound(task.problem.dtype, stored.environment.numerics) for task in tasks}
    permitted = {task: allowed(known, bounds[task]) for task, known in measured.items()}
    divided: Divided | None = None
    choices: Mapping[Task, TunedProblem]
    if config.workspace_budget_bytes is not None:
        divided = divide(permitted, config.workspace_budget_bytes, look_up)
        choices = divided.choices
    else:
        _require_feasible(permitted)
        choices = {task: choose(task, permitted[task], look_up) for task in tasks}
    problems = [choices[task].knowing(measured[task], error_bound=bounds[task]) for task in tasks]
    return Tuning(config, stored.environment, tuple(problems), divided)


def shortcomings(tasks: Sequence[Task], stored: Stored) -> tuple[str, ...]:
    """Return warnings about mini-batches measured only in smaller pieces, without the undivided baseline."""
    pieces: dict[tuple[int, tuple[int, ...]], int] = {}  # mini-batch, sizes -> number of tasks
    for task in tasks:
        micro_configs = {m.micro_config for m in stored.measurements(task)}
        if task.baseline not in micro_configs:
            key = task.batch_size, tuple(sorted({of.micro_batch_size for of in micro_configs}))
            pieces[key] = pieces.get(key, 0) + 1
    return tuple(
        f"{count} of {len(tasks)} convolutions, batch {n}: measured in micro-batches of {', '.join(map(str, sizes))} "
        "only, PyTorch's own undivided not among them; the answer is of these alone, and PyTorch's own may be faster: "
        "measure it with mucudnn tune"
        for (n, sizes), count in sorted(pieces.items())
    )


def _require_feasible(measured: dict[Task, list[Measurement]]) -> None:
    doubtful = {task: known for task, known in measured.items() if not _surely_fits(task, known)}
    smallest = {task: smallest_bytes(known, task.batch_size) for task, known in doubtful.items()}
    too_large = {
        task: size
        for task, size in smallest.items()
        if size is None or (task.limit_bytes is not None and size > task.limit_bytes)
    }
    if too_large:
        raise infeasible(too_large)


def _surely_fits(task: Task, measurements: Sequence[Measurement]) -> bool:
    """Whether equal micro-batches of one algorithm fit the task's limit, a check that needs no solver."""
    limit = inf if task.limit_bytes is None else task.limit_bytes
    dividing = (m for m in measurements if task.batch_size % m.micro_config.micro_batch_size == 0)
    return (
        task.in_headroom or task.baseline_exempt or any(m.prepared_bytes + m.scratch_bytes <= limit for m in dividing)
    )
