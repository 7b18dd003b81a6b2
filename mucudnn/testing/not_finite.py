"""Operands with elements that are not finite, and which results these must spoil by the definition of the operation."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from math import inf, nan

import torch
from torch import Tensor

from mucudnn.kernels.contract.reference import reference
from mucudnn.words.problem import ConvProblem, Operation

SAMPLES = 5  # one for each place
READ = {Operation.FORWARD: "xw", Operation.BACKWARD_DATA: "wy", Operation.BACKWARD_FILTER: "xy"}
IMAGE = {Operation.FORWARD: "x", Operation.BACKWARD_DATA: "y", Operation.BACKWARD_FILTER: "x"}
VALUES = (nan, inf, -inf)


def places(shape: tuple[int, int, int, int]) -> Tensor:
    """True at one element of each of the first samples (or filters), in channels that differ: the corners, the middle.

    The samples then tell how far each spreads, and in a filter's gradient the channels do.
    """
    n, c, height, width = shape
    spots = [(height // 2, width // 2), (0, 0), (height - 1, width - 1), (0, width - 1), (height - 1, 0)]
    where = torch.zeros(shape, dtype=torch.bool)
    for index, spot in zip(range(n), spots, strict=False):
        where[index, index % c, *spot] = True
    return where


def spoil(tensor: Tensor) -> None:
    """Write NaN and both infinities, by turns, to the ``places``."""
    values = cycle(VALUES)
    for index in places(tuple(tensor.shape)).nonzero():  # type: ignore[arg-type]
        tensor[tuple(index)] = next(values)


def dependent(problem: ConvProblem, operand: str, *, on_padding: bool = False) -> Tensor:
    """True at the results that have a spoilt element of the operand in one of their products.

    on_padding: products with the zeros of the padding count, too.
    """
    if on_padding:
        (down, right), height, width = problem.padding, problem.h, problem.w
        problem = replace(problem, padding=(0, 0), h=height + 2 * down, w=width + 2 * right)
    ones = {name: torch.ones(shape) for name, shape in _shapes(problem).items()}
    ones[operand] = places(_shapes(problem)[operand]).float()
    return reference(problem, **ones) != 0


def kinds(results: Tensor) -> Tensor:
    """0 where a result is finite, 1: infinite, -1: minus infinite, 2: NaN."""
    return results.isposinf().int() - results.isneginf().int() + 2 * results.isnan().int()


def _shapes(problem: ConvProblem) -> dict[str, tuple[int, int, int, int]]:
    return {"x": problem.x_shape(SAMPLES), "w": problem.w_shape(), "y": problem.y_shape(SAMPLES)}
