"""Cuts a correlation into the overlapping tiles of a minimal filtering algorithm F(m, r)."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.kernels.winograd.cook_toom import CookToom
from mucudnn.words.problem import ConvProblem, Operation, Pair


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of one micro-batch of a correlation from a *source* to a *target* image.

    Tile (i, j) makes the m x m target pixels from (i*m, j*m) on, out of the a x a source pixels from
    (i*m - top, j*m - left) on. Pixels outside the source are zero, those outside the target are dropped. Channel counts
    are those of one group.
    """

    n: int
    groups: int
    source_channels: int
    target_channels: int
    rows: int
    columns: int
    top: int
    left: int
    m: int
    a: int

    @property
    def count(self) -> int:
        """Tiles in the micro-batch."""
        return self.n * self.rows * self.columns


def tiling(matrices: CookToom, problem: ConvProblem, n: int) -> Tiling:
    """Return the tiles for ``n`` samples: of y, seen from x; for BACKWARD_DATA of dx, seen from dy."""
    c, k = problem.c // problem.groups, problem.k // problem.groups
    padding = source_padding(matrices, problem)
    if problem.operation is Operation.BACKWARD_DATA:
        return _tiling(matrices, problem, n, (k, c), (problem.h, problem.w), padding)
    return _tiling(matrices, problem, n, (c, k), (problem.p, problem.q), padding)


def source_padding(matrices: CookToom, problem: ConvProblem) -> Pair:
    """Return the (top, left) padding of the source.

    dx is the correlation of dy with the filter turned by 180 degrees, for which dy is padded by r - 1 - padding;
    where that is negative, dy is cropped.
    """
    top, left = problem.padding
    if problem.operation is Operation.BACKWARD_DATA:
        return matrices.r - 1 - top, matrices.r - 1 - left
    return top, left


def _tiling(
    matrices: CookToom, problem: ConvProblem, n: int, channels: Pair, target_size: Pair, padding: Pair
) -> Tiling:
    return Tiling(
        n=n,
        groups=problem.groups,
        source_channels=channels[0],
        target_channels=channels[1],
        rows=-(-target_size[0] // matrices.m),
        columns=-(-target_size[1] // matrices.m),
        top=padding[0],
        left=padding[1],
        m=matrices.m,
        a=matrices.a,
    )
