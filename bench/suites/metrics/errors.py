"""Errors of a result against float64: their norms, and where in the image they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

MAP_CELLS = 32  # most in each direction of a map
_DIGITS = 4  # of the errors in a map


@dataclass(frozen=True, slots=True)
class ErrorNorms:
    """Norms of ``actual - expected``: the sum of the absolute values, the Euclidean, and the largest absolute value.

    relative: the Euclidean over that of ``expected``. Infinite where ``actual`` is not finite.
    """

    l1: float
    l2: float
    largest: float
    relative: float

    @classmethod
    def of(cls, actual: Tensor, expected: Tensor) -> ErrorNorms:
        """Compute the norms in float64, of two tensors of one shape.

        >>> ErrorNorms.of(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 5.0]))
        ErrorNorms(l1=7.0, l2=5.0, largest=4.0, relative=1.0)
        """
        error = (actual.double() - expected.double()).flatten()
        if not error.isfinite().all():
            return cls(*(float("inf"),) * 4)
        l1, l2, largest = (float(torch.linalg.vector_norm(error, order)) for order in (1, 2, float("inf")))
        norm = float(torch.linalg.vector_norm(expected.double()))
        return cls(l1, l2, largest, l2 / norm if l2 else 0.0)


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


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> integers as long
