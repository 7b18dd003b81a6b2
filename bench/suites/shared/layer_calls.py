"""Calls of one layer through a module, and numbers that describe their results: errors, repeatability, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from mucudnn.core.errors import LibraryError, first_line
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.running.choices import Choices, make_executable
from mucudnn.running.modules import Conv2d, Conv3d, TunedModule

PASSED = "passed"
# Channels of each group, groups, and pixels of y after the first in each direction, of a layer that is cut down.
_CHANNELS, _GROUPS, _WINDOWS = 3, 2, 2


def module_of(configuration: Configuration, problem: ConvProblem, w: Tensor) -> nn.Module:
    """Return a module with the filter w that computes the problem's operation by a configuration, others by torch.

    Raises ``LibraryError`` if the module would run another configuration.
    """
    torchs, ours = (nn.Conv3d, Conv3d) if problem.is_volume else (nn.Conv2d, Conv2d)
    kind: Any = torchs if configuration.is_baseline else ours
    geometry = (problem.c, problem.k, problem.window, problem.stride, problem.padding, problem.dilation)
    module: nn.Module = kind(*geometry, problem.groups, bias=False, device="meta")
    module.weight = nn.Parameter(w.detach(), requires_grad=problem.operation is not Operation.BACKWARD_DATA)
    if isinstance(module, TunedModule):
        module.choices = Choices.of({problem: {configuration.batch_size: configuration}}, w.device.type)
        if make_executable(module.choices, problem, configuration.batch_size) is None:
            raise LibraryError(f"a module does not run {configuration} here: see the warning before")
    return module


def through_module(configuration: Configuration, problem: ConvProblem, operands: Operands) -> Callable[[], Tensor]:
    """Return a function that runs a configuration through a module and returns the operation's newly allocated result.

    For the forward operation, the function calls the module under autograd. For a backward operation, the function lets
    autograd compute that one gradient, after an untimed forward pass. Raises the error of ``module_of``.
    """
    module = module_of(configuration, problem, operands.w)
    if problem.operation is Operation.FORWARD:
        return partial(module, operands.x)
    is_of_data = problem.operation is Operation.BACKWARD_DATA
    x = operands.x.detach().requires_grad_(is_of_data)
    y = module(x)
    written: Any = x if is_of_data else module.weight
    return lambda: torch.autograd.grad(y, written, operands.y, retain_graph=True)[0]


def error_norms(actual: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the L1, L2 and maximum norms of ``actual - expected`` in float64, by column name.

    All three norms are infinite if ``actual`` has NaN or Inf.

    >>> error_norms(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0]))
    {'error_l1': 7.0, 'error_l2': 5.0, 'error_max': 4.0}
    """
    error = (actual.double() - expected.double()).flatten().nan_to_num(inf, inf, -inf)
    return {
        "error_l1": float(torch.linalg.vector_norm(error, 1)),
        "error_l2": float(torch.linalg.vector_norm(error, 2)),
        "error_max": float(torch.linalg.vector_norm(error, inf)),
    }


def distinct_results(results: Iterable[Tensor]) -> int:
    """Return the number of bitwise distinct results. -0 differs from 0, and a NaN equals itself.

    >>> distinct_results([torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([0.0])])
    2
    """
    return len({result.cpu().flatten().view(torch.uint8).numpy().tobytes() for result in results})


def cut_down(problem: ConvProblem) -> tuple[ConvProblem, ConvProblem]:
    """Return two float64 versions of a problem with few channels: the first with few pixels, the second with all.

    Filter, stride, padding and dilation are unchanged. The second is for algorithms that support only large images.
    """
    groups = min(problem.groups, _GROUPS)
    c, k = (groups * min(channels // problem.groups, _CHANNELS) for channels in (problem.c, problem.k))
    axes = zip(problem.extent, problem.window, problem.dilation, problem.stride, strict=True)
    pixels = [min(size, (taps - 1) * dilation + 1 + _WINDOWS * stride) for size, taps, dilation, stride in axes]
    large = replace(problem, c=c, k=k, groups=groups, dtype="float64")
    return large.with_extent(tuple(pixels)), large


def gradcheck(module: nn.Module, problem: ConvProblem, samples: int) -> str:
    """Run torch's gradcheck of y by x and w on a module that computes a float64 problem; return ``PASSED`` or why not.

    The fast mode of gradcheck is not used: it accepts an error of 5 %.
    """
    operands = random_operands(problem, samples)
    inputs = tuple(tensor.requires_grad_() for tensor in (operands.x, operands.w))
    try:
        with torch.enable_grad():
            torch.autograd.gradcheck(
                lambda x, w: functional_call(module, {"weight": w}, (x,)), inputs, check_undefined_grad=False
            )
    except GradcheckError as error:
        return f"failed: {first_line(error)}"
    return PASSED
