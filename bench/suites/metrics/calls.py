"""The calls that are timed of an algorithm: through a module, as training makes them, and the algorithm alone.

A configuration in micro-batches is timed likewise, with all its algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import run_torch, run_whole
from mucudnn.modules.conv2d import Conv2d
from mucudnn.running.operators import Choices
from mucudnn.running.workspace import lasting_buffer
from mucudnn.words.errors import LibraryError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig


@dataclass(frozen=True, slots=True)
class Computation:
    """A configuration, and the algorithms of its micro-batches by their names."""

    configuration: Configuration
    algorithms: Mapping[str, Algorithm]

    @classmethod
    def of(cls, algorithms: Iterable[Algorithm], micro_configs: Iterable[MicroConfig]) -> Computation:
        configuration = Configuration(tuple(micro_configs), time_s=0.0, workspace_bytes=0)
        return cls(configuration, {algorithm.name: algorithm for algorithm in algorithms})

    @classmethod
    def undivided(cls, algorithm: Algorithm, batch_size: int) -> Computation:
        """Return that of the whole mini-batch at once."""
        return cls.of([algorithm], [MicroConfig(algorithm.name, batch_size)])

    def of_few(self, samples: int) -> Computation:
        """Return the same of ``samples`` samples: undivided, or one by one, as many of each algorithm, or some more."""
        names = self.configuration.algorithms
        if len(self.configuration.micro_configs) == 1:
            return Computation.of(self.algorithms.values(), [MicroConfig(names[0], samples)])
        of_each = range(-(-samples // len(names)))
        return Computation.of(self.algorithms.values(), [MicroConfig(name, 1) for name in names for _ in of_each])


def compute(computation: Computation, problem: ConvProblem, operands: Operands) -> Tensor:
    """Compute a problem on operands. Raises what fails: nothing stands in for the algorithms."""
    return run_whole(problem, computation.configuration, operands)


def through_module(computation: Computation, problem: ConvProblem, operands: Operands) -> Callable[[], Tensor]:
    """Make ready the call of a module that runs a computation: it returns what the operation writes, newly allocated.

    forward: the module's call, in which autograd records what the backward pass needs. The others: autograd's call for
    that one gradient, of a forward pass that was made before. Torch's own runs in ``nn.Conv2d``, the others in
    ``mucudnn.Conv2d``.

    Raises ``LibraryError`` where the module would run something else.
    """
    module = _module(computation, problem, operands)
    if problem.operation is Operation.FORWARD:
        return partial(module, operands.x)
    of_data = problem.operation is Operation.BACKWARD_DATA
    x = operands.x.detach().requires_grad_(of_data)
    y = module(x)
    wanted = x if of_data else module.weight

    def gradient() -> Tensor:
        return torch.autograd.grad(y, wanted, operands.y, retain_graph=True)[0]

    return gradient


def alone(computation: Computation, problem: ConvProblem, operands: Operands) -> Callable[[], object]:
    """Make ready the algorithms without any module, autograd or allocation: they write into the operands.

    Torch's own is its convolution without autograd, which allocates its result.
    """
    if computation.configuration.is_baseline:
        return partial(run_torch, problem, operands)
    sizes = {m: computation.algorithms[m.algorithm].workspace(problem, m.micro_batch_size) for m in _parts(computation)}
    prepared: dict[str, Tensor] = {}
    for micro_config, size in sizes.items():
        prepared.setdefault(micro_config.algorithm, _buffer(size.prepared_bytes, operands))
    scratch = _buffer(max(size.scratch_bytes for size in sizes.values()), operands)
    w = operands.w
    opened = [(computation.algorithms[name], buffer) for name, buffer in prepared.items()]
    slices = [m.micro_batch_size for m in _parts(computation)]
    each = zip(_parts(computation), *(torch.split(one, slices) for one in (operands.x, operands.y)), strict=True)
    steps = [(computation.algorithms[m.algorithm], prepared[m.algorithm], x, y) for m, x, y in each]

    def call() -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            w.zero_()
        for algorithm, own in opened:
            algorithm.open(problem, w, own)
        for algorithm, own, x, y in steps:
            algorithm.step(problem, x, w, y, None, own, scratch)
        for algorithm, own in opened:
            algorithm.close(problem, w, own)

    return call


def _parts(computation: Computation) -> tuple[MicroConfig, ...]:
    return computation.configuration.micro_configs


def _buffer(size_bytes: int, operands: Operands) -> Tensor:
    return lasting_buffer(size_bytes).to(operands.x.device)


def _module(computation: Computation, problem: ConvProblem, operands: Operands) -> nn.Conv2d:
    geometry = (problem.c, problem.k, (problem.r, problem.s), problem.stride, problem.padding, problem.dilation)
    kind = nn.Conv2d if computation.configuration.is_baseline else Conv2d
    module = kind(*geometry, problem.groups, bias=False, device="meta")
    module.weight = nn.Parameter(operands.w.detach(), requires_grad=problem.operation is not Operation.BACKWARD_DATA)
    if isinstance(module, Conv2d):
        module.choices = _choices(computation.configuration, problem, operands)
    return module


def _choices(configuration: Configuration, problem: ConvProblem, operands: Operands) -> Choices:
    """Choose the configuration for its operation alone."""
    n = operands.batch_size
    choices = Choices.of({problem: {n: configuration}}, operands.x.device.type)
    executable = choices.executable(problem, n)
    if executable is None or executable.configuration != choices.configuration(problem, n):
        raise LibraryError(f"a module does not run {configuration} here: see the warning before")
    return choices
