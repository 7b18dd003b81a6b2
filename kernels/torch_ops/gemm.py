"""GEMM convolution: im2col for a whole micro-batch, then one matrix multiplication (batched over groups).

With M = N*P*Q positions and J = (C // groups)*R*S filter elements, the columns are a matrix X (M, J), the filter is W
(K, J) and the output is Y (M, K), for each group. The three operations are three products of the same matrices:

    forward Y = X W^T        backward data X = Y W        backward filter W += Y^T X

(Chellapilla, Puri, Simard, *High performance convolutional neural networks for document processing*, 2006.)
Channels-last tensors already have the layout of such matrices, and are used in place. Contiguous tensors hold a
transposed matrix per sample, so micro-batches of more than one sample are copied to scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import nan, prod

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, inside
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace, counted_internal_bytes
from mucudnn.kernels.memory import Part, carve, carved_bytes, torch_dtype


def multiply(operation: Operation, x: Tensor, w: Tensor, y: Tensor, *, accumulate: bool = False) -> None:
    """Multiply two of the batched matrices x, w and y, and write the product to the third (``accumulate``: add it).

    The operation determines which matrix is the output.

    x: (B, M, J).
    w: (B, K, J).
    y: (B, M, K).
    """
    left, right, out = _factors(operation, x, w, y)
    if out.stride(2) != 1:  # half precision: torch multiplies into transposed matrices by loops, 1000 times slower
        left, right, out = right.mT, left.mT, out.mT
    # In place, because out= would resize a tensor that is too small and write beyond its buffer.
    out.baddbmm_(left, right, beta=int(accumulate))


def _factors(operation: Operation, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two matrices that the operation multiplies, and the matrix to which it writes their product."""
    return {
        Operation.FORWARD: (x, w.transpose(1, 2), y),
        Operation.BACKWARD_DATA: (y, w, x),
        Operation.BACKWARD_FILTER: (y.transpose(1, 2), x, w),
    }[operation]


@dataclass(frozen=True, slots=True)
class Gemm(BaseAlgorithm):
    """Convolution as a matrix product after im2col, which copies the pixels under the filter into a matrix."""

    name: str = "gemm"
    device_type: str = "cpu"
    version: int = 1
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return None

    def is_foreign(self, problem: ConvProblem) -> bool:
        return problem.item_bytes < 4  # In half precision, oneDNN's matmul is not the code of its convolution.

    def is_local(self, problem: ConvProblem) -> bool:
        """Return whether torch's matmul keeps a NaN in its row and column; tested in half precision on the CPU only."""
        if self.device_type != "cpu" or problem.item_bytes >= 4:
            return True
        return _product_is_local(torch_dtype(problem), torch.get_num_threads())

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        scratch = _scratch_parts(problem, micro_batch_size)
        return Workspace(carved_bytes(sums_of_filter(problem)), carved_bytes(scratch))

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        if self.device_type == "cpu" and problem.item_bytes >= 4:
            return 0  # Only half precision allocates, in oneDNN's scratchpads and casts.
        return counted_internal_bytes(self, problem, micro_batch_size)

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        for accumulator in carve(prepared, sums_of_filter(problem)):
            accumulator.zero_()

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        views = iter(carve(scratch, _scratch_parts(problem, x.shape[0])))
        x_matrix = _x_matrix(problem, x, views)
        y_matrix = _y_matrix(problem, y, views)
        filters, accumulators = w_matrix(problem, w), carve(prepared, sums_of_filter(problem))
        if accumulators:  # in lower precision, gradients are added to a float32 sum
            gradient = next(views)
            multiply(problem.operation, x_matrix, gradient, y_matrix)
            accumulators[0].add_(gradient)
            return
        accumulate = problem.operation is Operation.BACKWARD_FILTER
        multiply(problem.operation, x_matrix, filters, y_matrix, accumulate=accumulate)
        if problem.operation is Operation.FORWARD:
            _store_y(problem, y_matrix, y, bias)
        elif problem.operation is Operation.BACKWARD_DATA and not _columns_in_place(problem, x.shape[0]):
            x.zero_()
            for tap, (rows, image_rows), (columns, image_columns) in _taps(problem, x_matrix):
                grouped(problem, x)[..., image_rows, image_columns].add_(tap[..., rows, columns])

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        for accumulator in carve(prepared, sums_of_filter(problem)):
            w_matrix(problem, w).add_(accumulator)


@lru_cache(maxsize=16)
def _product_is_local(dtype: torch.dtype, threads: int) -> bool:
    """Test whether a NaN affects only its own row or column of a product, on this processor with this many threads.

    With AMX, oneDNN 3.12 reads beyond the end of rows whose length is not a multiple of 32, and multiplies elements of
    the next row by zero (https://github.com/uxlfoundation/oneDNN/issues/5717). The test fills every second row and
    column with NaN.
    """
    # Sizes large enough for oneDNN, not multiples of 32, odd and even; every operation sums over each size once.
    sizes = ((33, 65, 100), (65, 100, 33), (100, 33, 65))
    for operation, (m, j, k), is_transposed in product(Operation, sizes, (False, True)):
        x, w, y = (torch.ones(2, *shape, dtype=dtype, device="cpu") for shape in ((m, j), (k, j), (m, k)))
        if is_transposed:
            x, y = (matrix.mT.contiguous().mT for matrix in (x, y))
        left, right, out = _factors(operation, x, w, y)
        left[:, 1::2] = nan
        right[:, :, 1::2] = nan
        multiply(operation, x, w, y)
        if not out[:, ::2, ::2].isfinite().all():
            return False
    return True


GEMM = Gemm()
GEMM_ON_CUDA = Gemm(device_type="cuda")


def sums_of_filter(problem: ConvProblem) -> list[Part]:
    """Return the float32 buffer part that sums filter gradients of lower precision; otherwise an empty list."""
    is_summed = problem.operation is Operation.BACKWARD_FILTER and problem.item_bytes < 4
    return [Part(_w_matrix_shape(problem), torch.float32)] if is_summed else []


def _scratch_parts(problem: ConvProblem, n: int) -> list[Part]:
    """Return the buffer parts that a micro-batch of ``n`` samples needs in scratch.

    As far as needed, these are the columns of im2col, a copy of y, and the filter gradient of the micro-batch.
    """
    dtype = torch_dtype(problem)
    positions, (groups, k, j) = n * problem.p * problem.q, _w_matrix_shape(problem)
    parts = []
    if not _columns_in_place(problem, n):
        parts.append(Part((groups, positions, j), dtype))
    if not _in_place(problem, n):
        parts.append(Part((groups, positions, k), dtype))
    if sums_of_filter(problem):
        parts.append(Part((groups, k, j), dtype))
    return parts


def _in_place(problem: ConvProblem, n: int) -> bool:
    """Return whether an activation of ``n`` samples already has the layout of a matrix, so that no copy is needed."""
    return n == 1 or problem.memory_format is MemoryFormat.CHANNELS_LAST


def _columns_in_place(problem: ConvProblem, n: int) -> bool:
    """Return whether x itself is the matrix of im2col's columns, as for 1x1 filters."""
    pointwise = (problem.r, problem.s, problem.stride, problem.padding) == (1, 1, (1, 1), (0, 0))
    return pointwise and _in_place(problem, n)


def _w_matrix_shape(problem: ConvProblem) -> tuple[int, int, int]:
    k, *elements = problem.w_shape()
    return problem.groups, k // problem.groups, prod(elements)


def w_matrix(problem: ConvProblem, w: Tensor) -> Tensor:
    """Return the filter as a view (groups, K, J), where J runs over the elements of one filter in memory order."""
    stored = w.movedim(1, -1) if problem.memory_format is MemoryFormat.CHANNELS_LAST else w
    return stored.view(_w_matrix_shape(problem))


def _activation_matrix(problem: ConvProblem, t: Tensor) -> Tensor:
    """Return x or y as a view (groups, positions, channels). Requires that ``_in_place`` is true."""
    if problem.memory_format is MemoryFormat.CHANNELS_LAST:
        return t.permute(0, 2, 3, 1).view(-1, problem.groups, t.shape[1] // problem.groups).transpose(0, 1)
    return t.view(problem.groups, t.shape[1] // problem.groups, -1).transpose(1, 2)


def _stored_matrix(problem: ConvProblem, part: Tensor) -> Tensor:
    """Return a part of scratch as a view (groups, positions, columns), transposed for contiguous problems."""
    if problem.memory_format is MemoryFormat.CHANNELS_LAST:
        return part
    groups, positions, columns = part.shape
    return part.view(groups, columns, positions).transpose(1, 2)


def _x_matrix(problem: ConvProblem, x: Tensor, views: Iterator[Tensor]) -> Tensor:
    """Return the columns of im2col, filled unless they are written."""
    if _columns_in_place(problem, x.shape[0]):
        return _activation_matrix(problem, x)
    matrix = _stored_matrix(problem, next(views))
    if problem.operation is not Operation.BACKWARD_DATA:
        for tap, (rows, image_rows), (columns, image_columns) in _taps(problem, matrix):
            pixels = tap[..., rows, columns]
            if pixels.shape != tap.shape:
                tap.zero_()  # padding is zero; one tap is small enough to stay in the cache until the copy
            pixels.copy_(grouped(problem, x)[..., image_rows, image_columns])
    return matrix


def _y_matrix(problem: ConvProblem, y: Tensor, views: Iterator[Tensor]) -> Tensor:
    if _in_place(problem, y.shape[0]):
        return _activation_matrix(problem, y)
    matrix = _stored_matrix(problem, next(views))
    if problem.operation is not Operation.FORWARD:
        _samples(problem, matrix, y).copy_(grouped(problem, y))
    return matrix


def _store_y(problem: ConvProblem, matrix: Tensor, y: Tensor, bias: Tensor | None) -> None:
    shift = None if bias is None else bias.view(1, problem.k, 1, 1)
    if _in_place(problem, y.shape[0]):
        if shift is not None:
            y.add_(shift)
        return
    product = _samples(problem, matrix, y)
    if shift is None:
        grouped(problem, y).copy_(product)
    else:
        torch.add(product, grouped(problem, shift), out=grouped(problem, y))


def grouped(problem: ConvProblem, t: Tensor) -> Tensor:
    """Return x or y as a view (N, groups, channels // groups, height, width)."""
    return torch.unflatten(t, 1, (problem.groups, -1))


def _samples(problem: ConvProblem, matrix: Tensor, y: Tensor) -> Tensor:
    """Return the matrix of a contiguous y as a view (N, groups, K // groups, P, Q)."""
    n, k, p, q = y.shape
    return matrix.transpose(1, 2).view(problem.groups, k // problem.groups, n, p, q).permute(2, 0, 1, 3, 4)


def _taps(problem: ConvProblem, matrix: Tensor) -> Iterator[tuple[Tensor, tuple[slice, slice], tuple[slice, slice]]]:
    """Yield the im2col columns of each filter element, with the rows and columns that lie inside the image.

    Columns have the shape (N, groups, C // groups, P, Q).
    """
    groups, c, p, q = problem.groups, problem.c // problem.groups, problem.p, problem.q
    if problem.memory_format is MemoryFormat.CHANNELS_LAST:
        taps = matrix.view(groups, -1, p, q, problem.r, problem.s, c).permute(4, 5, 1, 0, 6, 2, 3)
    else:
        stored = matrix.transpose(1, 2).view(groups, c, problem.r, problem.s, -1, p, q)
        taps = stored.permute(2, 3, 4, 0, 1, 5, 6)
    for r in range(problem.r):
        rows = inside(r * problem.dilation[0] - problem.padding[0], problem.stride[0], problem.h, p)
        for s in range(problem.s):
            columns = inside(s * problem.dilation[1] - problem.padding[1], problem.stride[1], problem.w, q)
            yield taps[r, s], rows, columns
