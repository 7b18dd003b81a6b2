"""Cuts a correlation into the overlapping tiles of a minimal filtering algorithm F(m, r)."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.kernels.winograd.cook_toom import CookToom
from mucudnn.words.problem import ConvProblem, Operation, Pair


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of one micro-batch of a correlation from a *source* to a *target* image.

    Tile (i, j) makes target_step x target_step target pixels from (i * target_step - skipped[0], j * target_step -
    skipped[1]) on, out of the source pixels from (i * source_step - padding[0], j * source_step - padding[1]) on.
    Pixels outside the source are zero, those outside the target are dropped. Channel counts are those of one group.
    """

    n: int
    groups: int
    source_channels: int
    target_channels: int
    rows: int
    columns: int
    source_step: int
    target_step: int
    padding: Pair
    skipped: Pair

    @property
    def count(self) -> int:
        """Tiles in the micro-batch."""
        return self.n * self.rows * self.columns


def tiling(matrices: CookToom, problem: ConvProblem, n: int) -> Tiling:
    """Return the tiles for ``n`` samples: of y, seen from x; for BACKWARD_DATA of dx, seen from dy.

    dx is the correlation of dy with the filter turned by 180 degrees, for which dy is padded by r - 1 - padding; where
    that is negative, dy is cropped. With a stride each phase of the filter makes every stride-th pixel of dx, in a tile
    that begins with the phases with a tap fewer: the first one in or before the image.
    """
    c, k = problem.c // problem.groups, problem.k // problem.groups
    m, stride, padding = matrices.m, matrices.stride, problem.padding
    if problem.operation is not Operation.BACKWARD_DATA:
        rows, columns = -(-problem.p // m), -(-problem.q // m)
        return Tiling(n, problem.groups, c, k, rows, columns, stride * m, m, padding, (0, 0))
    longest = -(-matrices.r // stride)  # phase
    (above, top), (before, left) = (divmod(size + matrices.late, stride) for size in padding)
    rows, columns = -(-(problem.h + top) // (stride * m)), -(-(problem.w + left) // (stride * m))
    padding = (longest - 1 - above, longest - 1 - before)
    return Tiling(n, problem.groups, k, c, rows, columns, m, stride * m, padding, (top, left))
