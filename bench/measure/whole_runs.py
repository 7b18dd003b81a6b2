"""Whole runs: is the configuration that the solver likes really faster than torch?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mucudnn.bench.measure.candidate_errors import CANDIDATE_ERRORS, give_back_cache
from mucudnn.bench.measure.comparison import Comparison, compare_in_turns
from mucudnn.bench.measure.operands import Operands, random_operands
from mucudnn.bench.measure.timer import Clock, WallClock
from mucudnn.kernels.contract.algorithm import Algorithm, AlgorithmSource
from mucudnn.kernels.contract.out_of_memory import is_out_of_memory
from mucudnn.kernels.registry import algorithms, sources
from mucudnn.kernels.torch_ops.torch_convolution import torch_convolution
from mucudnn.running.checked_run import run
from mucudnn.running.environment import Environment, current_environment
from mucudnn.running.workspace import on_huge_pages
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration


def run_whole(
    problem: ConvProblem, configuration: Configuration, operands: Operands, *, keeps_workspace: bool = True
) -> Tensor:
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
    run(problem, configuration, x, w, y, keeps_workspace=keeps_workspace)
    return target


def run_torch(problem: ConvProblem, operands: Operands) -> Tensor:
    """The baseline: torch's own convolution, undivided. Returns what the operation writes."""
    geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
    return torch_convolution(problem.operation, operands.x, operands.w, operands.y, None, *geometry)


@dataclass(frozen=True, slots=True)
class Machine:
    """What tuning needs of the machine that it runs on; tests put another in its place.

    algorithms: those for every problem. sources: of those that depend on the problem.
    """

    environment: Environment
    algorithms: Sequence[Algorithm]
    device: str = "cpu"
    clock: Clock = field(default_factory=WallClock)
    run: Callable[..., object] = run_whole
    run_torch: Callable[[ConvProblem, Operands], object] = run_torch
    sources: Sequence[AlgorithmSource] = ()

    @classmethod
    def current(cls, device: str = "cpu") -> Machine:
        """Raises ``UnavailableError`` for a device that is not there."""
        environment = current_environment(device)
        return cls(environment, algorithms(device), device, _clock(device), sources=sources(device))

    def compare(
        self, problem: ConvProblem, batch_size: int, configurations: Sequence[Configuration], *, keeps_workspace: bool
    ) -> list[Comparison | Exception | None]:
        """Whole runs of the configurations against torch's own, in turns; keeps_workspace: from call to call.

        None where there is no memory for the mini-batch, or for torch's own: then nothing can be compared.
        """
        try:
            operands = random_operands(problem, batch_size, self.device)
            run = partial(self.run, problem, operands=operands, keeps_workspace=keeps_workspace)
            runs = [partial(run, configuration=configuration) for configuration in configurations]
            return [*compare_in_turns(partial(self.run_torch, problem, operands), runs, self.clock)]
        except CANDIDATE_ERRORS as error:
            if not is_out_of_memory(error):
                raise
        give_back_cache()
        return [None] * len(configurations)


def _clock(device: str) -> Clock:
    if device == "cpu":
        return WallClock()
    from mucudnn.bench.measure.cuda_clock import CudaClock  # where there is CUDA

    return CudaClock()
