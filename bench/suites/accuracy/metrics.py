"""Metrics of a call against float64: error norms and maps, repeatability, and numerical checks of gradients.

- ``with_errors``: errors of the first result, and the number of distinct results.
- ``gradcheck``: torch's gradcheck in float64, on a layer reduced to few channels and, if the algorithm supports that,
  few pixels. Some algorithms have separate code for float64.
- ``gradcheck_elements``: torch's gradcheck of any function in float64, at random elements and sums of outputs.
- ``directional_error``: finite differences in the layer's own dtype, on the layer itself with ``SAMPLES`` samples, or
  more if a configuration has more algorithms. Convolution is linear in x and in w, so a difference is exact up to
  rounding even if the step is as long as the operand.

The contestant computes one operation of a layer and the reference the other two, so that a failed check is the
contestant's fault. A forward contestant computes the finite differences, a backward contestant the gradient.

Torch's fast mode of gradcheck is not used: it checks random sums of elements with a tolerance that grows with their
number, and accepts an error of 5 %.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.nn import functional as F

from mucudnn.bench.folders.rows import Row
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.words.errors import first_line
from mucudnn.words.problem import ConvProblem, Operation

MAP_CELLS = 32  # maximum number of cells of an error map in each direction
_DIGITS = 4  # significant digits of the errors in a map
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer dtype by bytes of an element


def with_errors(row: Row, call: Callable[[], Tensor], expected: Tensor, runs: int) -> Row:
    """Add the errors of the call's first result, and the number of distinct results in ``runs`` calls, to a row.

    A result of shape (A, B, height, width) gets an error map. Raises any error of the call.
    """
    first = call().detach()
    again = (call().detach() for _ in range(runs - 1))
    found = {
        **error_norms(first, expected),
        "error_map": error_map(first, expected) if first.ndim == 4 else None,
        "runs": runs,
        "distinct_results": distinct_results(chain([first], again)),
    }
    return replace(row, relative_error=relative_l2_error(first, expected), more={**row.more, **found})


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


def error_map(actual: Tensor, expected: Tensor) -> list[list[float]]:
    """Return the mean absolute error at each pixel of the image, or at each element of the filter, row by row.

    actual, expected: (A, B, height, width); the mean is over A and B. The map of a large image has ``MAP_CELLS`` cells
    in each direction, each with the mean over its pixels.

    >>> error_map(torch.tensor([[[[1.0, 2.0]]], [[[3.0, 2.0]]]]), torch.zeros(2, 1, 1, 2))
    [[2.0, 2.0]]
    """
    at_pixels = (actual.double() - expected.double()).abs().mean(dim=(0, 1))
    height, width = (min(size, MAP_CELLS) for size in at_pixels.shape)
    cells = F.adaptive_avg_pool2d(at_pixels[None, None], (height, width))[0, 0]
    return [[float(f"{error:.{_DIGITS}g}") for error in row] for row in cells.tolist()]


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


SAMPLES = 2
PASSED = "passed"
_CHANNELS = 3  # channels of each group in the reduced layer
_GROUPS = 2
_WINDOWS = 2  # pixels of y after the first, in each direction
ELEMENTS = 64  # maximum number of elements, of all inputs together and of the outputs, that are checked one by one
SUMS = 4  # number of random sums of outputs that are checked instead
# Tolerances of gradcheck, relative to the largest derivative and, for rounding, to the largest output.
_OF_LARGEST, _OF_ROUNDING = 1e-5, 1e-8

Compute = Callable[[ConvProblem, Operands], Tensor]


def gradcheck(problem: ConvProblem, compute: Compute, samples: int = SAMPLES) -> str:
    """Run torch's gradcheck on a convolution in float64, with this many samples; return ``PASSED`` or the failure.

    problem: the convolution. compute: computes the problem's operation; its errors propagate.
    """
    operands = random_operands(problem, samples)
    x, w = (tensor.requires_grad_() for tensor in (operands.x, operands.w))
    by_operation = dict.fromkeys(Operation, exact) | {problem.operation: compute}
    return _verdict(partial(_convolution, problem, by_operation), (x, w))


def _verdict(function: Callable[..., Tensor], inputs: Sequence[Tensor], **tolerance: float) -> str:
    """Run torch's gradcheck on all elements of the inputs; return ``PASSED`` or the failure."""
    try:
        with torch.enable_grad():
            torch.autograd.gradcheck(function, inputs, check_undefined_grad=False, **tolerance)  # type: ignore[arg-type]
    except GradcheckError as error:
        return f"failed: {first_line(error)}"
    return PASSED


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


def directional_error(problem: ConvProblem, compute: Compute, device: str = "cpu", samples: int = SAMPLES) -> float:
    """Return the relative error of the derivative along a random direction u, against finite differences.

    The loss is <v, y>. Its gradient v is chosen along the exact derivative of y, which makes the loss's derivative as
    large as possible. Forward: the contestant's (y(x + u) - y(x - u)) / 2 is compared with the exact <dx, u>. Backward
    data: the contestant's <dx, u> is compared with exact differences along u in x. Backward filter: the contestant's
    <dw, u> is compared with exact differences along u in w.

    compute: the contestant, which computes the operation of a problem; its errors propagate.
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
    """Compute the result of the operation in float64."""
    return reference(problem, operands.x, operands.w, operands.y)


def _convolution(problem: ConvProblem, compute: Mapping[Operation, Compute], x: Tensor, w: Tensor) -> Tensor:
    y: Tensor = _Convolution.apply(x, w, problem, compute)  # type: ignore[no-untyped-call]
    return y


class _Convolution(torch.autograd.Function):
    """A differentiable convolution whose forward pass and two backward passes are computed by given functions."""

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


def gradcheck_elements(compute: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> str:
    """Run torch's gradcheck on a float64 function; return ``PASSED`` with the number of elements, or the failure.

    A numerical derivative takes two calls per input element, an exact one takes a backward pass per output. With more
    than ``ELEMENTS`` input elements, a random selection is checked; with more outputs, ``SUMS`` random sums of outputs
    are checked.

    compute: the function, called with tensors in place of ``tensors``; its errors propagate.
    """
    places = _places([tensor.numel() for tensor in tensors])
    counts = [len(one) for one in places]
    outputs = compute(tensors).numel()
    weights = torch.randn(outputs, SUMS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = weights.to(tensors[0].device) if outputs > ELEMENTS else None

    def of_shifts(shifts: Tensor) -> Tensor:
        parts = zip(tensors, places, torch.split(shifts, counts), strict=True)
        y = compute([_shifted(tensor, where, by) for tensor, where, by in parts]).flatten()
        return y if sums is None else y @ sums

    shifts = tensors[0].new_zeros(sum(counts), requires_grad=True)
    verdict = _verdict(of_shifts, (shifts,), atol=_tolerance(of_shifts, shifts))
    drawn = _what_was_drawn(sum(counts), sum(tensor.numel() for tensor in tensors), outputs)
    return verdict + drawn if verdict == PASSED else verdict


def _places(sizes: Sequence[int]) -> list[Tensor]:
    """Return the positions of the elements to check in each tensor: all if there are few, otherwise random ones."""
    if sum(sizes) <= ELEMENTS:
        return [torch.arange(size) for size in sizes]
    drawn = torch.Generator().manual_seed(0)
    order = torch.randperm(len(sizes), generator=drawn).tolist()
    turns = Counter(islice((index for turn in range(ELEMENTS) for index in order if turn < sizes[index]), ELEMENTS))
    return [torch.randperm(size, generator=drawn)[: turns[index]] for index, size in enumerate(sizes)]


def _shifted(tensor: Tensor, places: Tensor, by: Tensor) -> Tensor:
    """Return a copy of the tensor in which ``by`` is added to the elements at the positions ``places``."""
    if not len(places):
        return tensor.detach()
    every = by.new_zeros(tensor.numel()).index_put((places.to(by.device),), by)
    return tensor.detach() + every.view(tensor.shape)


def _tolerance(of_shifts: Callable[[Tensor], Tensor], shifts: Tensor) -> float:
    with torch.enable_grad():
        derivative = torch.autograd.functional.jacobian(of_shifts, shifts)  # type: ignore[no-untyped-call]
        outputs = of_shifts(shifts).detach()
    return _OF_LARGEST * float(derivative.abs().max()) + _OF_ROUNDING * float(outputs.abs().max())


def _what_was_drawn(elements: int, of: int, outputs: int) -> str:
    if elements == of and outputs <= ELEMENTS:
        return ""
    against = f"{SUMS} random sums of the {outputs} outputs" if outputs > ELEMENTS else f"all {outputs} outputs"
    which = f"all {of} elements" if elements == of else f"{elements} of {of} elements, drawn"
    return f": {which}, each against {against}"
