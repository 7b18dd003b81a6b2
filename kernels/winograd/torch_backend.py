"""Winograd convolution with torch operators, for every device, in float32 and float64; torch allocates nothing in it.

Half precision is computed in float32. Images in the scratch buffer are channels-last for either memory format of the
problem: the copies into and out of the padded images convert both layout and dtype. The transforms are sums of strided
views (``add_`` with a factor), the products one batched matrix multiplication over points and groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import numpy as np
import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.kernels.contract.buffers import Part, carve, carved_bytes, compute_dtype, inside, torch_dtype
from mucudnn.kernels.winograd.cook_toom import CookToom, Matrix, kronecker
from mucudnn.kernels.winograd.tiling import Tiling, tiling
from mucudnn.words.problem import ConvProblem, Operation

_NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


class TorchWinograd:
    """Winograd's arithmetic with torch operators; ``WinogradBackend`` in algorithms.py describes methods and shapes."""

    def workspace(self, matrices: CookToom, problem: ConvProblem, n: int) -> Workspace:
        prepared, scratch = _prepared_parts(matrices, problem), _scratch_parts(matrices, problem, n)
        return Workspace(carved_bytes(prepared), carved_bytes(scratch))

    def transform_filter(self, matrices: CookToom, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Compute the transformed filter U = G w G^T, with w rotated by 180 degrees for BACKWARD_DATA."""
        transformed, *staging = carve(prepared, _prepared_parts(matrices, problem))
        taps = _taps(_wide(w, staging))
        g = _filter_matrix(matrices, transformed.dtype, transformed.device)
        if problem.operation is Operation.BACKWARD_DATA:
            g = _filter_matrix(matrices, transformed.dtype, transformed.device, turned=True)
        transformed.transpose(0, 1).baddbmm_(g.expand(len(w), -1, -1), taps.transpose(1, 2), beta=0)

    def correlate(
        self,
        matrices: CookToom,
        problem: ConvProblem,
        source: Tensor,
        target: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        """Compute target = A^T [U * (B^T source B)] A + bias; products with U are summed over the source's channels."""
        tiles = tiling(matrices, problem, len(source))
        left, right = carve(scratch, _scratch_parts(matrices, problem, len(source)))
        transformed = carve(prepared, _prepared_parts(matrices, problem))[0]
        a_t, b_t = _matrices(matrices, problem)
        u = transformed.view(matrices.a**2 * tiles.groups, problem.k // problem.groups, problem.c // problem.groups)
        if problem.operation is Operation.FORWARD:
            u = u.transpose(1, 2)
        v = _transform_tiles(b_t, tiles, source, (left, right))
        product = _head(right, (matrices.a**2 * tiles.groups, tiles.count, tiles.target_channels))
        product.baddbmm_(v, u, beta=0)
        _inverse_transform(a_t, tiles, product, target, bias, (right, left))

    def accumulate(
        self, matrices: CookToom, problem: ConvProblem, x: Tensor, y: Tensor, prepared: Tensor, scratch: Tensor
    ) -> None:
        """Add to the filter gradient's transform: dU += (A dy A^T) * (B^T x B), summed over the tiles."""
        tiles = tiling(matrices, problem, len(x))
        x_tiles, y_tiles, half = carve(scratch, _scratch_parts(matrices, problem, len(x)))
        v = _transform_tiles(matrices.b_t, tiles, x, (x_tiles, y_tiles))
        a = tuple(zip(*matrices.a_t, strict=True))
        d = _transform_tiles(a, tiles, y, (y_tiles, half), of_target=True)
        transformed = carve(prepared, _prepared_parts(matrices, problem))[0]
        du = transformed.view(matrices.a**2 * tiles.groups, tiles.target_channels, tiles.source_channels)
        du.baddbmm_(d.transpose(1, 2), v)

    def fold(self, matrices: CookToom, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Transform the filter gradient back and add it to w: w += G^T dU G."""
        transformed, *staging = carve(prepared, _prepared_parts(matrices, problem))
        wide = _wide(w, staging)
        g = _filter_matrix(matrices, transformed.dtype, transformed.device)
        taps = _taps(wide)
        taps.baddbmm_(transformed.permute(1, 2, 0), g.expand(len(w), -1, -1))
        if wide is not w:
            w.copy_(wide)


def _prepared_parts(matrices: CookToom, problem: ConvProblem) -> list[Part]:
    """Return the buffer part of the transformed filter or gradient, (points, K, C // groups).

    In half precision a second part holds the filter in float32.
    """
    k, c, r, s = problem.w_shape()
    dtype = compute_dtype(problem)
    parts = [Part((matrices.a**2, k, c), dtype)]
    return parts if dtype == torch_dtype(problem) else [*parts, Part((k, c, r, s), dtype)]


def _matrices(matrices: CookToom, problem: ConvProblem) -> tuple[Matrix, Matrix]:
    """Return the matrix A^T, which computes tiles of the target image, and B^T, which transforms source tiles."""
    if problem.operation is Operation.BACKWARD_DATA:
        return matrices.dx_a_t, matrices.dx_b_t
    return matrices.a_t, matrices.b_t


def _scratch_parts(matrices: CookToom, problem: ConvProblem, n: int) -> list[Part]:
    """Return the flat parts of the scratch buffer. Each stage of the computation reads one part and writes another."""
    tiles = tiling(matrices, problem, n)
    a, step = matrices.a, tiles.target_step
    per_tile = tiles.groups * tiles.count
    source, target = per_tile * tiles.source_channels, per_tile * tiles.target_channels
    half_source = prod(_half_shape(tiles, _matrices(matrices, problem)[1], tiles.source_step, tiles.source_channels))
    if problem.operation is Operation.BACKWARD_FILTER:
        half_target = a * step * target
        sizes = [a * a * source, max(half_source, a * a * target), half_target]
    else:
        sizes = [max(a * a * source, step * a * target), max(half_source, a * a * target)]
    return [Part((size,), compute_dtype(problem)) for size in sizes]


def _half_shape(tiles: Tiling, matrix: Matrix, step: int, channels: int) -> tuple[int, ...]:
    """Return the shape of tiles transformed along their height only: (a, n, rows, image width, groups, channels)."""
    width = step * (tiles.columns - 1) + len(matrix[0])
    return (len(matrix), tiles.n, tiles.rows, width, tiles.groups, channels)


def _transform_tiles(
    matrix: Matrix, tiles: Tiling, image: Tensor, buffers: tuple[Tensor, Tensor], *, of_target: bool = False
) -> Tensor:
    """Compute ``matrix @ tile @ matrix^T`` for every tile of an image (n, groups * channels, height, width).

    Return the transformed tiles (points * groups, tiles, channels), in the first buffer. The stages are: padded image
    (first buffer), half transformed (second), transformed (first).
    """
    step, padding, channels = tiles.source_step, tiles.padding, tiles.source_channels
    if of_target:
        step, padding, channels = tiles.target_step, tiles.skipped, tiles.target_channels
    half_shape = _half_shape(tiles, matrix, step, channels)
    a, length = len(matrix), len(matrix[0])
    height = step * (tiles.rows - 1) + length
    padded = _head(buffers[0], (tiles.n, height, *half_shape[3:]))
    _pad(image, padded, padding)
    half = _head(buffers[1], half_shape)
    _apply(matrix, [padded[:, i : height - length + i + 1 : step] for i in range(length)], half.unbind(0))
    result = _head(buffers[0], (a, a, tiles.groups, tiles.n, tiles.rows, tiles.columns, channels))
    span = half_shape[3] - length + 1
    columns = [half[:, :, :, j : span + j : step] for j in range(length)]
    _apply(matrix, columns, result.permute(1, 0, 3, 4, 5, 2, 6).unbind(0))
    return result.view(a**2 * tiles.groups, tiles.count, channels)


def _inverse_transform(
    a_t: Matrix, tiles: Tiling, product: Tensor, target: Tensor, bias: Tensor | None, buffers: tuple[Tensor, Tensor]
) -> None:
    """Compute ``A^T product A + bias`` for every tile, into the target image (n, channels, height, width).

    The first buffer holds the product. The half-transformed product is written to the second buffer, then the pixels
    are written to the first.
    """
    a, step, n, rows, columns = len(a_t[0]), tiles.target_step, tiles.n, tiles.rows, tiles.columns
    grouped = (tiles.groups, tiles.target_channels)
    half = _head(buffers[1], (step, a, grouped[0], n, rows, columns, grouped[1]))
    _apply(a_t, product.view(a, *half.shape[1:]).unbind(0), half.unbind(0))
    image = _head(buffers[0], (n, rows, step, columns, step, *grouped))
    start = None if bias is None else bias.view(grouped)
    points = half.permute(1, 0, 3, 4, 5, 2, 6).unbind(0)
    _apply(a_t, points, image.permute(4, 2, 0, 1, 3, 5, 6).unbind(0), start)
    whole = image.view(n, rows * step, columns * step, prod(grouped)).permute(0, 3, 1, 2)
    top, left = tiles.skipped
    target.copy_(whole[:, :, top : top + target.shape[2], left : left + target.shape[3]])


def _apply(matrix: Matrix, sources: Sequence[Tensor], targets: Sequence[Tensor], start: Tensor | None = None) -> None:
    """Compute targets[i] = start + sum over j of matrix[i][j] * sources[j]."""
    for row, target in zip(matrix, targets, strict=True):
        if start is None:
            target.zero_()
        else:
            target.copy_(start)
        for factor, source in zip(row, sources, strict=True):
            if factor:
                target.add_(source, alpha=float(factor))


def _pad(image: Tensor, padded: Tensor, padding: tuple[int, int]) -> None:
    """Fill ``padded`` (n, height, width, groups, channels) with zeros, and copy an image into its middle.

    image: (n, channels, height, width). Pixel (0, 0) goes to position ``padding``, which may be negative; pixels
    outside are dropped.
    """
    padded.zero_()
    n, _, height, width = image.shape
    grouped = image.permute(0, 2, 3, 1).view(n, height, width, *padded.shape[3:])
    (to_rows, from_rows), (to_columns, from_columns) = (
        inside(-padding[axis], 1, image.shape[2 + axis], padded.shape[1 + axis]) for axis in (0, 1)
    )
    padded[:, to_rows, to_columns].copy_(grouped[:, from_rows, from_columns])


def _head(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: prod(shape)].view(shape)


def _taps(w: Tensor) -> Tensor:
    """Return a view of the filter (K, C // groups, R, S) as (K, C // groups, R * S), for both memory formats."""
    return w.view(*w.shape[:2], -1)


def _wide(w: Tensor, staging: Sequence[Tensor]) -> Tensor:
    """Return the filter in the dtype of the computation: the filter itself, or its copy in the buffer ``staging``."""
    return staging[0].copy_(w) if staging else w


@cache
def _filter_matrix(matrices: CookToom, dtype: torch.dtype, device: torch.device, *, turned: bool = False) -> Tensor:
    """Return the matrix that transforms a flattened filter, (a * a, r * r), from G for both dimensions.

    Each entry is rounded once. ``turned``: whether the filter is rotated by 180 degrees.
    """
    g = tuple(row[::-1] for row in matrices.g) if turned else matrices.g
    rows = [[float(x) for x in row] for row in kronecker(g, g)]
    # Through numpy, because a cached constant must not be counted as an allocation of a call.
    return torch.from_numpy(np.array(rows, dtype=_NUMPY_DTYPES[dtype])).to(device)
