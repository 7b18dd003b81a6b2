"""Winograd convolution on CUDA: transforms by mucudnn's winograd.cu, products over channels by torch (cuBLAS).

The stages are not fused: the transformed tiles, (a / m)^2 times as large as the image, and their products pass through
memory. The scratch buffer therefore grows with the micro-batch, and stays in the cache if the micro-batch is small.
Images and filters are read and written in either memory format without a copy. Half precision is computed in float32,
subject to ``torch.backends.cuda.matmul``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.kernels.contract.buffers import Part, carve, carved_bytes, compute_dtype
from mucudnn.kernels.cuda.cupy_launcher import CupyLauncher, LaunchError
from mucudnn.kernels.winograd.cook_toom import CookToom
from mucudnn.kernels.winograd.cuda_source import winograd_source
from mucudnn.kernels.winograd.tiling import Tiling, tiling
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation, Pair

# nvcc 13.0 uses 32 to 108 registers per thread (float64: up to 179): at least four (two) blocks per multiprocessor.
BLOCK_THREADS = 128
_LARGEST_PLANE = 2**31 - 1  # The CUDA functions count elements in 32 bits.


@dataclass(frozen=True, slots=True)
class CudaWinograd:
    """Winograd's arithmetic on CUDA; ``WinogradBackend`` in algorithms.py describes methods and shapes."""

    launcher: CupyLauncher = field(default_factory=CupyLauncher)

    def workspace(self, matrices: CookToom, problem: ConvProblem, n: int) -> Workspace:
        prepared, scratch = (
            _filter_part(matrices, problem),
            _tile_parts(matrices, problem, tiling(matrices, problem, n)),
        )
        return Workspace(carved_bytes([prepared]), carved_bytes(scratch))

    def transform_filter(self, matrices: CookToom, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Compute the transformed filter U = G w G^T, with w rotated by 180 degrees for BACKWARD_DATA."""
        (u,) = carve(prepared, [_filter_part(matrices, problem)])
        turned = problem.operation is Operation.BACKWARD_DATA
        function = "transform_turned_filter" if turned else "transform_filter"
        self._of_filters(matrices, problem, function, w, (w.data_ptr(), u.data_ptr()))

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
        if bias is not None and bias.dtype != target.dtype:
            raise InvalidInputError(f"bias has dtype {bias.dtype}; it must be that of the images, {target.dtype}")
        tiles = tiling(matrices, problem, len(source))
        v, product = carve(scratch, _tile_parts(matrices, problem, tiles))
        (u,) = carve(prepared, [_filter_part(matrices, problem)])
        if problem.operation is Operation.FORWARD:
            u = u.transpose(1, 2)  # The shape is now (points, channels of the source, channels of the target).
        pointers = (source.data_ptr(), v.data_ptr())
        self._of_images(matrices, problem, tiles, "transform_source", source, pointers, tiles.padding)
        if problem.memory_format is MemoryFormat.CHANNELS_LAST:
            product.baddbmm_(v, u, beta=0)
        else:
            product.baddbmm_(u.transpose(1, 2), v, beta=0)
        results = (product.data_ptr(), 0 if bias is None else bias.data_ptr(), target.data_ptr())
        self._of_images(matrices, problem, tiles, "inverse_transform", target, results)

    def accumulate(
        self, matrices: CookToom, problem: ConvProblem, x: Tensor, y: Tensor, prepared: Tensor, scratch: Tensor
    ) -> None:
        """Add to the filter gradient's transform: dU += (A dy A^T) * (B^T x B), summed over the tiles."""
        tiles = tiling(matrices, problem, len(x))
        v, d = carve(scratch, _tile_parts(matrices, problem, tiles))
        (du,) = carve(prepared, [_filter_part(matrices, problem)])
        pointers = (x.data_ptr(), v.data_ptr())
        self._of_images(matrices, problem, tiles, "transform_source", x, pointers, tiles.padding)
        self._of_images(matrices, problem, tiles, "transform_gradient", y, (y.data_ptr(), d.data_ptr()))
        if problem.memory_format is MemoryFormat.CHANNELS_LAST:
            du.baddbmm_(d.transpose(1, 2), v)
        else:
            du.baddbmm_(d, v.transpose(1, 2))

    def fold(self, matrices: CookToom, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Transform the filter gradient back and add it to w: w += G^T dU G."""
        (du,) = carve(prepared, [_filter_part(matrices, problem)])
        self._of_filters(matrices, problem, "add_filter_gradient", w, (du.data_ptr(), w.data_ptr()))

    def _of_images(
        self,
        matrices: CookToom,
        problem: ConvProblem,
        tiles: Tiling,
        function: str,
        image: Tensor,
        pointers: tuple[int, ...],
        padding: Pair = (0, 0),
    ) -> None:
        """Launch a CUDA function with one thread for each tile and channel of an image. padding: of the first tile."""
        _, channels, height, width = image.shape
        sizes = (channels, channels // tiles.groups, tiles.count, tiles.rows, tiles.columns, height, width, *padding)
        self._launch(matrices, problem, function, channels * tiles.count, pointers, sizes, image.device)

    def _of_filters(
        self, matrices: CookToom, problem: ConvProblem, function: str, w: Tensor, pointers: tuple[int, ...]
    ) -> None:
        """Launch a CUDA function with one thread for each channel of each filter."""
        count = w.shape[0] * w.shape[1]
        self._launch(matrices, problem, function, count, pointers, (count, w.shape[1]), w.device)

    def _launch(
        self,
        matrices: CookToom,
        problem: ConvProblem,
        function: str,
        threads: int,
        pointers: tuple[int, ...],
        sizes: tuple[int, ...],
        device: torch.device,
    ) -> None:
        if threads > _LARGEST_PLANE:
            raise LaunchError(
                f"{function} has {threads} elements for each point; the limit is {_LARGEST_PLANE}; use a smaller "
                "micro-batch"
            )
        source = winograd_source(matrices, problem.dtype, problem.memory_format, BLOCK_THREADS)
        blocks = -(-threads // BLOCK_THREADS)
        self.launcher.launch(source, function, blocks, BLOCK_THREADS, pointers, sizes, device)


def _filter_part(matrices: CookToom, problem: ConvProblem) -> Part:
    """Return the buffer part of the transformed filter or gradient, (points * groups, K // groups, C // groups)."""
    k, c, _, _ = problem.w_shape()
    return Part((matrices.a**2 * problem.groups, k // problem.groups, c), compute_dtype(problem))


def _tile_parts(matrices: CookToom, problem: ConvProblem, tiles: Tiling) -> list[Part]:
    """Return the buffer parts of the transformed source tiles, and of their products or the transformed dy.

    The shape is (points * groups, channels, tiles); for channels_last the last two dimensions are swapped.
    """
    points, dtype = matrices.a**2 * tiles.groups, compute_dtype(problem)
    if problem.memory_format is MemoryFormat.CHANNELS_LAST:
        return [Part((points, tiles.count, c), dtype) for c in (tiles.source_channels, tiles.target_channels)]
    return [Part((points, c, tiles.count), dtype) for c in (tiles.source_channels, tiles.target_channels)]
