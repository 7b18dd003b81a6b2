"""Torch's gradcheck of a function of tensors that may be large: element by element, of some elements and sums.

A numerical derivative takes two calls for each element, and an exact one takes a backward pass for each output. So of
many elements some are drawn, and of many outputs random sums are looked at. Gradcheck's own way out, its fast mode,
looks at random sums of elements, too, with a tolerance that grows with their number: it passes what is 5 % wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from mucudnn.bench.suites.metrics.gradients import PASSED
from mucudnn.words.errors import first_line

ELEMENTS = 64  # of all tensors together, and of outputs: more are not looked at one by one
SUMS = 4
# Two elements of a derivative are alike within a part of the largest one, or what rounding makes of the outputs.
_OF_LARGEST, _OF_ROUNDING = 1e-5, 1e-8


def gradcheck_elements(compute: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> str:
    """Run torch's gradcheck of a function of float64 tensors; returns ``PASSED`` with what was drawn, or what failed.

    compute: the function. It gets tensors in place of ``tensors``, and raises what it likes.
    """
    places = _places([tensor.numel() for tensor in tensors])
    counts = [len(one) for one in places]
    outputs = compute(tensors).numel()
    sums = _drawn_sums(outputs).to(tensors[0].device) if outputs > ELEMENTS else None

    def of_shifts(shifts: Tensor) -> Tensor:
        parts = zip(tensors, places, torch.split(shifts, counts), strict=True)
        y = compute([_shifted(tensor, where, by) for tensor, where, by in parts]).flatten()
        return y if sums is None else y @ sums

    shifts = tensors[0].new_zeros(sum(counts), requires_grad=True)
    try:
        with torch.enable_grad():
            tolerance = _tolerance(of_shifts, shifts)
            torch.autograd.gradcheck(of_shifts, (shifts,), atol=tolerance, check_undefined_grad=False)
    except GradcheckError as error:
        return f"failed: {first_line(error)}"
    return PASSED + _what_was_drawn(sum(counts), sum(tensor.numel() for tensor in tensors), outputs)


def _places(sizes: Sequence[int]) -> list[Tensor]:
    """Return the numbers of those that are looked at: all where they are few, else some of the tensors in turns."""
    if sum(sizes) <= ELEMENTS:
        return [torch.arange(size) for size in sizes]
    drawn = torch.Generator().manual_seed(0)
    order = torch.randperm(len(sizes), generator=drawn).tolist()
    turns = Counter(islice((index for turn in range(ELEMENTS) for index in order if turn < sizes[index]), ELEMENTS))
    return [torch.randperm(size, generator=drawn)[: turns[index]] for index, size in enumerate(sizes)]


def _drawn_sums(outputs: int) -> Tensor:
    """Return the weights of random sums, (outputs, SUMS)."""
    return torch.randn(outputs, SUMS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _shifted(tensor: Tensor, places: Tensor, by: Tensor) -> Tensor:
    """Return the tensor with some elements moved, as a function of how far."""
    if not len(places):
        return tensor.detach()
    every = by.new_zeros(tensor.numel()).index_put((places.to(by.device),), by)
    return tensor.detach() + every.view(tensor.shape)


def _tolerance(of_shifts: Callable[[Tensor], Tensor], shifts: Tensor) -> float:
    derivative = torch.autograd.functional.jacobian(of_shifts, shifts)  # type: ignore[no-untyped-call]
    outputs = of_shifts(shifts).detach()
    return _OF_LARGEST * float(derivative.abs().max()) + _OF_ROUNDING * float(outputs.abs().max())


def _what_was_drawn(elements: int, of: int, outputs: int) -> str:
    if elements == of and outputs <= ELEMENTS:
        return ""
    against = f"{SUMS} random sums of the {outputs} outputs" if outputs > ELEMENTS else f"all {outputs} outputs"
    which = f"all {of} elements" if elements == of else f"{elements} of {of} elements, drawn"
    return f": {which}, each against {against}"
