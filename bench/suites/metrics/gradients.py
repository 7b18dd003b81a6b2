"""Numerical checks of gradients: what an operation computes against differences of the convolution itself.

One operation of a layer is computed by the contestant, the other two by the reference. So a check blames nobody else:
of forward the differences are of what it computes, of the backward operations it gives the gradient.

- **gradcheck**: torch's own, in float64, element by element: its fast mode can pass what is some percent wrong. It runs
  on the layer cut down to few channels and, where the algorithm computes that, few pixels. Some algorithms have other
  code for float64.
- **Directional differences**, in the layer's own dtype, on the layer itself with ``SAMPLES`` samples, or more where a
  configuration has more algorithms. The convolution is linear in x and in w: a difference over a step as long as the
  operand is exact but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.kernels.contract.reference import reference
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.words.errors import first_line
from mucudnn.words.problem import ConvProblem, Operation

SAMPLES = 2
PASSED = "passed"
_CHANNELS = 3  # of a group, in the layer cut down
_GROUPS = 2
_WINDOWS = 2  # pixels of y beside the first, in each direction

Compute = Callable[[ConvProblem, Operands], Tensor]


def gradcheck(problem: ConvProblem, compute: Compute, samples: int = SAMPLES) -> str:
    """Run torch's gradcheck on a problem in float64, on so many samples; returns ``PASSED``, or what failed.

    compute: computes the problem's operation. Raises what ``compute`` raises.
    """
    operands = random_operands(problem, samples)
    x, w = (tensor.requires_grad_() for tensor in (operands.x, operands.w))
    by_operation = dict.fromkeys(Operation, exact) | {problem.operation: compute}
    with torch.enable_grad():
        try:
            torch.autograd.gradcheck(partial(_convolution, problem, by_operation), (x, w), check_undefined_grad=False)
        except GradcheckError as error:
            return f"failed: {first_line(error)}"
    return PASSED


def cut_down(problem: ConvProblem) -> tuple[ConvProblem, ConvProblem]:
    """Return the problem in float64 with few channels: with few pixels, too, and with all of them.

    Filter, stride, padding and dilation stay. Some algorithms are for large images alone.
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


def directional_error(problem: ConvProblem, compute: Compute, device: str = "cpu", samples: int = SAMPLES) -> float:
    """Return the relative error of the derivative along a random direction u, against differences.

    The loss is <v, y> with v along the exact derivative of y, so that it is as long as can be. forward: the differences
    (y(x + u) - y(x - u)) / 2 are the contestant's, the derivative is <dx, u>, exact. Backward data: the contestant's
    <dx, u> against exact differences along u of x; backward filter: <dw, u>, along u of w.

    compute: computes the operation of a problem. It raises what ``compute`` raises.
    """
    at, direction = (random_operands(problem, samples, device, seed) for seed in (0, 1))
    if problem.operation is Operation.FORWARD:
        plus, minus = ((at.x + sign * direction.x) for sign in (1, -1))  # rounded to the dtype
        step = (plus.double() - minus.double()) / 2
        v = exact(problem, replace(at, x=step))
        ends = (compute(problem, replace(at, x=x)).double() for x in (plus, minus))
        difference = float(((next(ends) - next(ends)) / 2 * v).sum())
        return abs(difference / float((v * v).sum()) - 1)
    of_data = problem.operation is Operation.BACKWARD_DATA
    moved = replace(at, x=direction.x) if of_data else replace(at, w=direction.w)
    along = direction.x if of_data else direction.w
    y = exact(problem.with_operation(Operation.FORWARD), moved)
    v = y.to(dtype=at.y.dtype, memory_format=TORCH_FORMATS[problem.memory_format])
    derivative = float((compute(problem, replace(at, y=v)).double() * along.double()).sum())
    return abs(derivative / float((v.double() * y).sum()) - 1)


def exact(problem: ConvProblem, operands: Operands) -> Tensor:
    """Compute the operation in float64."""
    return reference(problem, operands.x, operands.w, operands.y)


def _convolution(problem: ConvProblem, compute: Mapping[Operation, Compute], x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = _Convolution.apply(x, w, problem, compute)  # type: ignore[no-untyped-call]
    return y


class _Convolution(torch.autograd.Function):
    """A convolution whose three operations are computed by functions that are handed in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, problem: ConvProblem, compute: Mapping[Operation, Compute]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.problem, ctx.compute = problem, compute
        return _computed(ctx, Operation.FORWARD, Operands(x, w, x.new_empty(problem.y_shape(len(x)))))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, w = ctx.saved_tensors
        operands = Operands(x, w, dy)
        dx = _computed(ctx, Operation.BACKWARD_DATA, operands)
        return dx, _computed(ctx, Operation.BACKWARD_FILTER, operands), None, None


def _computed(ctx: Any, operation: Operation, operands: Operands) -> Tensor:
    in_format = TORCH_FORMATS[ctx.problem.memory_format]
    x, w, y = (t.detach().contiguous(memory_format=in_format) for t in (operands.x, operands.w, operands.y))
    result: Tensor = ctx.compute[operation](ctx.problem.with_operation(operation), Operands(x, w, y))
    return result
