"""The overlapping image tiles that the Winograd algorithm F(m, r) transforms to compute a correlation."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.words.problem import ConvProblem, Operation, Pair


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of one micro-batch, for a correlation that computes a *target* image from a *source* image.

    With unit stride, tile (i, j) computes m x m target pixels from (i * m, j * m) on. It reads source pixels from
    (i * m - padding[0], j * m - padding[1]) on. Pixels outside the source are zero, pixels outside the target are
    dropped. Channel counts are per group. count: number of tiles in the micro-batch.
    """

    groups: int
    source_channels: int
    target_channels: int
    rows: int
    columns: int
    count: int
    padding: Pair


def tiling(m: int, problem: ConvProblem, n: int) -> Tiling:
    """Return the tiles of m x m outputs for ``n`` samples: from x to y, or from dy to dx for BACKWARD_DATA.

    dx is the correlation of dy with the filter rotated by 180 degrees, with dy padded by r - 1 - padding, or cropped if
    that is negative. With a stride, each phase of the filter (every stride-th element, or tap) computes every stride-th
    pixel of dx. Tiles begin with the phases that have one tap fewer, so the first tile may begin before the image.
    """
    c, k = problem.c // problem.groups, problem.k // problem.groups
    stride, padding = problem.stride[0], problem.padding
    if problem.operation is not Operation.BACKWARD_DATA:
        rows, columns = -(-problem.p // m), -(-problem.q // m)
        return Tiling(problem.groups, c, k, rows, columns, n * rows * columns, padding)
    longest, late = -(-problem.r // stride), -problem.r % stride  # taps of the longest phase; phases with one tap fewer
    (above, top), (before, left) = (divmod(size + late, stride) for size in padding)
    rows, columns = -(-(problem.h + top) // (stride * m)), -(-(problem.w + left) // (stride * m))
    padding = (longest - 1 - above, longest - 1 - before)
    return Tiling(problem.groups, k, c, rows, columns, n * rows * columns, padding)
