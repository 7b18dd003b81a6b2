"""Metrics of a tensor or a module: error norms, repeatability, and a numerical check of gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from mucudnn.core.errors import first_line
from mucudnn.core.problem import ConvProblem
from mucudnn.measuring.operands import random_operands

PASSED = "passed"
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by bytes of an element
# Channels of each group, groups, and pixels of y after the first in each direction, of a layer that is cut down.
_CHANNELS, _GROUPS, _WINDOWS = 3, 2, 2


def error_norms(actual: Tensor, expected: Tensor) -> dict[str, float]:
    """Return the L1, L2 and maximum norms of ``actual - expected`` in float64, by column name.

    All three norms are infinite if ``actual`` has NaN or Inf.

    >>> error_norms(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0]))
    {'error_l1': 7.0, 'error_l2': 5.0, 'error_max': 4.0}
    """
    error = (actual.double() - expected.double()).flatten()
    orders = {"error_l1": 1, "error_l2": 2, "error_max": inf}
    if not error.isfinite().all():
        return dict.fromkeys(orders, inf)
    return {name: float(torch.linalg.vector_norm(error, order)) for name, order in orders.items()}


def distinct_results(results: Iterable[Tensor]) -> int:
    """Return the number of bitwise distinct results. -0 differs from 0, and a NaN equals itself.

    >>> distinct_results([torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([0.0])])
    2
    """
    found: list[Tensor] = []
    for result in results:
        bits = result.view(_BITS[result.itemsize])
        if not any(torch.equal(bits, other) for other in found):
            found.append(bits)
    return len(found)


def cut_down(problem: ConvProblem) -> tuple[ConvProblem, ConvProblem]:
    """Return two float64 versions of a problem with few channels: the first with few pixels, the second with all.

    Filter, stride, padding and dilation are unchanged. The second is for algorithms that support only large images.
    """
    groups = min(problem.groups, _GROUPS)
    c, k = (groups * min(channels // problem.groups, _CHANNELS) for channels in (problem.c, problem.k))
    h, w = (
        min(size, (taps - 1) * dilation + 1 + _WINDOWS * stride)
        for size, taps, dilation, stride in zip(
            (problem.h, problem.w), (problem.r, problem.s), problem.dilation, problem.stride, strict=True
        )
    )
    large = replace(problem, c=c, k=k, groups=groups, dtype="float64")
    return replace(large, h=h, w=w), large


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
