"""The timed calls of a configuration: through a PyTorch module, as in training, and of its algorithms alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import run_torch
from mucudnn.modules.conv2d import Conv2d
from mucudnn.running.choices import Choices
from mucudnn.running.workspace import lasting_buffer
from mucudnn.words.errors import LibraryError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig


def configuration_of(*micro_configs: MicroConfig) -> Configuration:
    """Return a configuration of these micro-batches; its time and workspace, which are unknown, are set to 0."""
    return Configuration(micro_configs, time_s=0.0, workspace_bytes=0)


def of_few(configuration: Configuration, samples: int) -> Configuration:
    """Return a configuration with the same algorithms, each for an equal part of about ``samples`` samples."""
    names = configuration.algorithms
    if len(configuration.micro_configs) == 1:
        return configuration_of(MicroConfig(names[0], samples))
    of_each = range(-(-samples // len(names)))
    return configuration_of(*(MicroConfig(name, 1) for name in names for _ in of_each))


def through_module(configuration: Configuration, problem: ConvProblem, operands: Operands) -> Callable[[], Tensor]:
    """Return a function that runs a configuration through a module and returns the operation's newly allocated result.

    For the forward operation, the function calls the module under autograd. For a backward operation it makes autograd
    compute that one gradient, after an untimed forward pass. Torch's own convolution runs in ``nn.Conv2d``, every other
    algorithm in ``mucudnn.Conv2d``.

    Raises ``LibraryError`` if the module would run another configuration.
    """
    module = _module(configuration, problem, operands)
    if problem.operation is Operation.FORWARD:
        return partial(module, operands.x)
    of_data = problem.operation is Operation.BACKWARD_DATA
    x = operands.x.detach().requires_grad_(of_data)
    y = module(x)
    wanted = x if of_data else module.weight
    return lambda: torch.autograd.grad(y, wanted, operands.y, retain_graph=True)[0]


def alone(configuration: Configuration, problem: ConvProblem, operands: Operands) -> Callable[[], object]:
    """Return a function that runs a configuration's algorithms alone, and writes their result into ``operands``.

    The function uses no module or autograd and allocates nothing; only torch's own convolution allocates its result.
    """
    if configuration.is_baseline:
        return partial(run_torch, problem, operands)
    device, parts, w = operands.x.device, configuration.micro_configs, operands.w
    algorithms = {name: algorithm(name, device.type) for name in configuration.algorithms}
    sizes = {part: algorithms[part.algorithm].workspace(problem, part.micro_batch_size) for part in parts}
    prepared = {part.algorithm: lasting_buffer(size.prepared_bytes).to(device) for part, size in sizes.items()}
    scratch = lasting_buffer(max(size.scratch_bytes for size in sizes.values())).to(device)
    opened = [(algorithms[name], buffer) for name, buffer in prepared.items()]
    slices = [torch.split(tensor, [part.micro_batch_size for part in parts]) for tensor in (operands.x, operands.y)]
    steps = [
        (algorithms[one.algorithm], prepared[one.algorithm], x, y) for one, x, y in zip(parts, *slices, strict=True)
    ]

    def call() -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            w.zero_()
        for one, own in opened:
            one.open(problem, w, own)
        for one, own, x, y in steps:
            one.step(problem, x, w, y, None, own, scratch)
        for one, own in opened:
            one.close(problem, w, own)

    return call


def _module(configuration: Configuration, problem: ConvProblem, operands: Operands) -> nn.Conv2d:
    geometry = (problem.c, problem.k, (problem.r, problem.s), problem.stride, problem.padding, problem.dilation)
    kind = nn.Conv2d if configuration.is_baseline else Conv2d
    module = kind(*geometry, problem.groups, bias=False, device="meta")
    module.weight = nn.Parameter(operands.w.detach(), requires_grad=problem.operation is not Operation.BACKWARD_DATA)
    if isinstance(module, Conv2d):
        n = operands.batch_size
        module.choices = Choices.of({problem: {n: configuration}}, operands.x.device.type)
        executable = module.choices.executable(problem, n)
        if executable is None or executable.configuration != module.choices.configuration(problem, n):
            raise LibraryError(f"a module does not run {configuration} here: see the warning before")
    return module
