"""Replay: the choices that ``tune`` would make from stored measurements, without a device and without measuring."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.running.environment import Environment
from mucudnn.solver.policies import micro_batch_sizes
from mucudnn.tuning.choose import Outcome, choose
from mucudnn.tuning.divide import Divided, divide
from mucudnn.tuning.infeasible import infeasible, smallest_bytes
from mucudnn.tuning.result import TunedProblem, Tuning, allowed
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.results import Configuration, Measurement, MicroConfig, WholeRun
from mucudnn.words.task import Task
from mucudnn.words.torch_settings import TORCHS_OWN


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
    choices: dict[Task, TunedProblem] = {}
    too_large: dict[Task, int | None] = {}
    if config.workspace_budget_bytes is not None:
        divided = divide(permitted, config.workspace_budget_bytes, look_up)
        choices |= divided.choices
    for task, known in permitted.items() if divided is None else ():
        try:
            choices[task] = choose(task, known, look_up)
        except InfeasibleError:
            too_large[task] = smallest_bytes(known, task.batch_size)
    if too_large:
        raise infeasible(too_large)
    problems = [choices[task].knowing(measured[task], error_bound=bounds[task]) for task in tasks]
    return Tuning(config, stored.environment, tuple(problems), divided)


def shortcomings(tasks: Sequence[Task], stored: Stored, policy: BatchSizePolicy) -> tuple[str, ...]:
    """Return what the measurements lack: PyTorch's own undivided, and larger candidates that were not measured."""
    from mucudnn.kernels.registry import algorithms

    known = {one.name: one for one in algorithms(stored.environment.device_type)}
    without_baseline, without_larger = 0, 0
    for task in tasks:
        measured = {m.micro_config: m.prepared_bytes + m.scratch_bytes for m in stored.measurements(task)}
        without_baseline += task.baseline not in measured
        most = max((size for of, size in measured.items() if of.algorithm in known), default=0)
        limit = inf if task.limit_bytes is None else task.limit_bytes
        names = {of.algorithm for of in measured if of.algorithm in known and of.algorithm != TORCHS_OWN}
        sizes = micro_batch_sizes(policy, task.batch_size)
        unmeasured = (MicroConfig(name, n) for name in names for n in sizes if MicroConfig(name, n) not in measured)
        without_larger += any(most < _needed_bytes(known[of.algorithm], task, of) <= limit for of in unmeasured)
    return tuple(
        f"{count} of {len(tasks)} convolutions: {what}; mucudnn tune without --stored measures what may be faster"
        for count, what in (
            (without_baseline, "PyTorch's own undivided was not measured at this batch size"),
            (without_larger, "candidates with more workspace than all that were measured fit this limit"),
        )
        if count
    )


def _needed_bytes(algorithm: Algorithm, task: Task, micro_config: MicroConfig) -> int:
    if algorithm.supports_micro_batch(task.problem, micro_config.micro_batch_size) is not None:
        return 0
    workspace = algorithm.workspace(task.problem, micro_config.micro_batch_size)
    return workspace.prepared_bytes + workspace.scratch_bytes
