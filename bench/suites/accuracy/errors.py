"""Errors of a call's results against float64: their norms, where they are, and whether the call repeats bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.bench.folders.rows import Row
from mucudnn.kernels.contract.reference import relative_l2_error

MAP_CELLS = 32  # most in each direction of a map
_DIGITS = 4  # of the errors in a map
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> integers as long


def with_errors(row: Row, call: Callable[[], Tensor], expected: Tensor, runs: int) -> Row:
    """Return the row with the errors of the first result, and how many of ``runs`` results are distinct.

    Images, (A, B, height, width), have a map of the errors. Raises what the call raises.
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
    """Return three norms of ``actual - expected`` by their columns; infinite where ``actual`` is not finite.

    They are the sum of the absolute values, the Euclidean norm, and the largest absolute value, in float64.

    >>> error_norms(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0]))
    {'error_l1': 7.0, 'error_l2': 5.0, 'error_max': 4.0}
    """
    error = (actual.double() - expected.double()).flatten()
    orders = {"error_l1": 1, "error_l2": 2, "error_max": inf}
    if not error.isfinite().all():
        return dict.fromkeys(orders, inf)
    return {name: float(torch.linalg.vector_norm(error, order)) for name, order in orders.items()}


def error_map(actual: Tensor, expected: Tensor) -> list[list[float]]:
    """Return the mean absolute error at each pixel of the image, or at each tap of the filter, row by row.

    actual, expected: (A, B, height, width); the mean is over A and B. Larger images have ``MAP_CELLS`` cells in each
    direction, each with the mean of its pixels.

    >>> error_map(torch.tensor([[[[1.0, 2.0]]], [[[3.0, 2.0]]]]), torch.zeros(2, 1, 1, 2))
    [[2.0, 2.0]]
    """
    at_pixels = (actual.double() - expected.double()).abs().mean(dim=(0, 1))
    height, width = (min(size, MAP_CELLS) for size in at_pixels.shape)
    cells = F.adaptive_avg_pool2d(at_pixels[None, None], (height, width))[0, 0]
    return [[float(f"{error:.{_DIGITS}g}") for error in row] for row in cells.tolist()]


def distinct_results(results: Iterable[Tensor]) -> int:
    """Count results that differ from all before them in any bit: -0 differs from 0, a NaN is equal to itself.

    >>> distinct_results([torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor([0.0])])
    2
    """
    found: list[Tensor] = []
    for result in results:
        bits = result.view(_BITS[result.itemsize])
        if not any(torch.equal(bits, other) for other in found):
            found.append(bits)
    return len(found)
