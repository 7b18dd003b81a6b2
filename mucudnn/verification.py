"""Whole runs: is the configuration that the solver likes really faster than torch?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mucudnn.bench.comparison import Comparison, compare_in_turns
from mucudnn.bench.operands import Operands, random_operands
from mucudnn.bench.timer import Clock, WallClock
from mucudnn.configuration import Configuration, Measurement
from mucudnn.environment import Environment, current_environment
from mucudnn.execution import run, torch_convolution
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.registry import algorithms
from mucudnn.pages import on_huge_pages
from mucudnn.problem import ConvProblem, Operation
from mucudnn.solver.front import desirable_sets

MOST_CONTENDERS = 3
_NEARLY_AS_FAST = 1.15  # predictions this close are within what sums of parts and noise get wrong


def run_whole(problem: ConvProblem, configuration: Configuration, operands: Operands) -> Tensor:
    """One call as ``mucudnn.Conv2d`` makes it: the baseline is torch's own, others allocate their result newly,
    as torch's is. Returns what the operation writes.
    """
    if configuration.is_baseline:
        return run_torch(problem, operands)
    x, w, y = operands.x, operands.w, operands.y
    match problem.operation:
        case Operation.FORWARD:
            target = y = on_huge_pages(torch.empty_like(y))
        case Operation.BACKWARD_DATA:
            target = x = on_huge_pages(torch.empty_like(x))
        case Operation.BACKWARD_FILTER:
            target = w = on_huge_pages(torch.empty_like(w))
    run(problem, configuration, x, w, y)
    return target


def run_torch(problem: ConvProblem, operands: Operands) -> Tensor:
    """The baseline: torch's own convolution, undivided. Returns what the operation writes."""
    geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
    return torch_convolution(problem.operation, operands.x, operands.w, operands.y, None, *geometry)


@dataclass(frozen=True, slots=True)
class Machine:
    """What tuning needs of the machine that it runs on; tests put another in its place."""

    environment: Environment
    algorithms: Sequence[Algorithm]
    device: str = "cpu"
    clock: Clock = field(default_factory=WallClock)
    run: Callable[[ConvProblem, Configuration, Operands], object] = run_whole
    run_torch: Callable[[ConvProblem, Operands], object] = run_torch

    @classmethod
    def current(cls, device: str = "cpu") -> Machine:
        """Raises ``UnavailableError`` for a device that is not there."""
        return cls(current_environment(device), algorithms(device), device)

    def compare(
        self, problem: ConvProblem, batch_size: int, configurations: Sequence[Configuration]
    ) -> list[Comparison | Exception]:
        """Whole runs of the configurations against torch's own, in turns."""
        operands = random_operands(problem, batch_size, self.device)
        runs = [partial(self.run, problem, configuration, operands) for configuration in configurations]
        return compare_in_turns(partial(self.run_torch, problem, operands), runs, self.clock)


def contenders(measurements: Sequence[Measurement], batch_size: int, limit_bytes: int | None) -> list[Configuration]:
    """Configurations that deserve a whole run: the fastest by prediction, and the best of single algorithms that come
    near it, each other than the baseline. Only the baseline if there is no other. They are in the order of prediction.

    There is at least one configuration that fits.
    """
    found = _fastest(measurements, batch_size, limit_bytes)
    for name in {m.micro_config.algorithm for m in measurements}:
        own = [m for m in measurements if m.micro_config.algorithm == name]
        found |= _fastest(own, batch_size, limit_bytes)
        found |= _fastest([m for m in own if m.micro_config.micro_batch_size < batch_size], batch_size, limit_bytes)
    ranked = sorted(found, key=lambda c: (c.time_s, c.workspace_bytes, c.micro_configs))
    others = [c for c in ranked if not c.is_baseline]
    near = [c for c in others if c.time_s <= _NEARLY_AS_FAST * others[0].time_s]
    return near[:MOST_CONTENDERS] or ranked


def _fastest(measurements: Sequence[Measurement], batch_size: int, limit_bytes: int | None) -> set[Configuration]:
    fastest = desirable_sets(measurements, batch_size).fastest(batch_size, limit_bytes) if measurements else None
    return set() if fastest is None else {fastest}
