"""Direct convolution by one matrix product for each filter tap on a shifted view of the image, without im2col.

The padded image is stored by *phase*: with stride (2, 2), pixels of even and odd rows and columns are stored
separately. In one phase, all outputs of a tap (filter element) (r, s) read pixels at a constant distance. With a whole
micro-batch as matrices X (pixels, C) and Y (pixels, K), each tap is therefore a product of contiguous row ranges:

    forward Y += X[d:] W[r, s]^T        backward data X[d:] += Y W[r, s]        backward filter W[r, s] += Y^T X[d:]

Y has the row length of X; the few columns (and last rows) without output are dropped, or zero. The workspace is one
copy of x and y, independent of the filter's size. Sums over taps are in at least float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation, Pair, inside
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace, counted_internal_bytes
from mucudnn.kernels.memory import Part, carve, carved_bytes, compute_dtype, torch_dtype
from mucudnn.kernels.torch_ops.gemm import grouped, multiply


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of a problem's padded image that filter elements read; with stride (2, 2) at most four.

    A phase has every stride-th row and column of the image.

    height: of one phase.
    width: of one phase.
    offsets: position of each phase's first pixel in the padded image.
    taps: of each filter element (r, s), the phase that it reads, and the number of rows, in the phase's matrix, between
    an output's row and the row that is read for it.
    tail: number of zero rows appended to the matrix X, so that every filter element can read as many rows as Y has.
    """

    problem: ConvProblem
    height: int
    width: int
    offsets: tuple[Pair, ...]
    taps: tuple[tuple[int, int], ...]
    tail: int

    def pixels(self, phase: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
        """Return the pixels that a phase and the unpadded image share, as (rows, columns) of the phase and of x."""
        problem, offset = self.problem, self.offsets[phase]
        rows = inside(offset[0] - problem.padding[0], problem.stride[0], problem.h, self.height)
        columns = inside(offset[1] - problem.padding[1], problem.stride[1], problem.w, self.width)
        return (rows[0], columns[0]), (rows[1], columns[1])


@cache
def phases(problem: ConvProblem) -> Phases:
    """Return the phases (see ``Phases``) of a problem; cached, because every micro-batch needs them."""
    height = -(-(problem.h + 2 * problem.padding[0]) // problem.stride[0])
    width = -(-(problem.w + 2 * problem.padding[1]) // problem.stride[1])
    reads = []
    for r, s in product(range(problem.r), range(problem.s)):
        down, row = divmod(r * problem.dilation[0], problem.stride[0])
        right, column = divmod(s * problem.dilation[1], problem.stride[1])
        reads.append(((row, column), down * width + right))
    offsets = tuple(dict.fromkeys(offset for offset, _ in reads))
    taps = tuple((offsets.index(offset), distance) for offset, distance in reads)
    return Phases(problem, height, width, offsets, taps, tail=max(distance for _, distance in taps))


@dataclass(frozen=True, slots=True)
class Direct(BaseAlgorithm):
    """Direct convolution by one matrix product for each filter element; half precision is computed in float32."""

    name: str = "direct"
    device_type: str = "cpu"
    version: int = 1
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return None

    def is_local(self, problem: ConvProblem) -> bool:
        """Return False for BACKWARD_FILTER only, where a NaN in x may affect further results.

        The rows of the matrix Y without output are zero, but they are multiplied by the pixels of X in the same place,
        and 0 * NaN is NaN.
        """
        return problem.operation is not Operation.BACKWARD_FILTER

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        scratch = _scratch_parts(phases(problem), micro_batch_size)
        return Workspace(carved_bytes(_prepared_parts(problem)), carved_bytes(scratch))

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        if self.device_type == "cpu":
            return 0
        return counted_internal_bytes(self, problem, micro_batch_size)  # cuBLAS's workspace

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        matrices = carve(prepared, _prepared_parts(problem))[0]
        if problem.operation is Operation.BACKWARD_FILTER:
            matrices.zero_()
        else:
            matrices.copy_(_by_tap(problem, w))

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
        layout = phases(problem)
        x_matrix, y_matrix = carve(scratch, _scratch_parts(layout, len(x)))
        w_matrix = carve(prepared, _prepared_parts(problem))[0]
        x_pixels, y_pixels = _x_pixels(layout, x_matrix, x), _as_image(layout, y_matrix)[..., : problem.p, : problem.q]
        # Load what is read; what is written begins with the bias, or zero.
        x_matrix.zero_()
        if problem.operation is not Operation.BACKWARD_DATA:
            for pixels, image_pixels in x_pixels:
                pixels.copy_(image_pixels)
        if problem.operation is not Operation.FORWARD:
            y_matrix.zero_()
            y_pixels.copy_(grouped(problem, y))
        elif bias is None:
            y_matrix.zero_()
        else:
            y_matrix.copy_(bias.view(problem.groups, 1, -1))
        # Add the products of one filter element after the other.
        for index, (phase, distance) in enumerate(layout.taps):
            rows = x_matrix[phase, :, distance : distance + y_matrix.shape[1]]
            multiply(problem.operation, rows, w_matrix[index], y_matrix, accumulate=True)
        if problem.operation is Operation.FORWARD:
            grouped(problem, y).copy_(y_pixels)
        elif problem.operation is Operation.BACKWARD_DATA:
            x.zero_()  # A stride can skip pixels, which must be zero.
            for pixels, image_pixels in x_pixels:
                image_pixels.copy_(pixels)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is not Operation.BACKWARD_FILTER:
            return
        matrices, *staging = carve(prepared, _prepared_parts(problem))
        taps = _by_tap(problem, w)
        if staging:
            taps.copy_(staging[0].copy_(taps).add_(matrices))
        else:
            taps.add_(matrices)


def _prepared_parts(problem: ConvProblem) -> list[Part]:
    """Return the buffer part for the filter as R * S matrices, (R * S, groups, K // groups, C // groups).

    In half precision, the filter gradient dw needs this part twice.
    """
    dtype = compute_dtype(problem)
    k, c = problem.k // problem.groups, problem.c // problem.groups
    part = Part((problem.r * problem.s, problem.groups, k, c), dtype)
    staged = problem.operation is Operation.BACKWARD_FILTER and dtype != torch_dtype(problem)
    return [part, part] if staged else [part]


def _scratch_parts(layout: Phases, n: int) -> list[Part]:
    """Return the scratch buffer's parts X (phases, groups, rows + tail, C // groups), Y (groups, rows, K // groups)."""
    problem = layout.problem
    dtype = compute_dtype(problem)
    rows, groups = n * layout.height * layout.width, problem.groups
    x = Part((len(layout.offsets), groups, rows + layout.tail, problem.c // groups), dtype)
    return [x, Part((groups, rows, problem.k // groups), dtype)]


def _by_tap(problem: ConvProblem, w: Tensor) -> Tensor:
    """Return a view of the filter w with its elements first: (R * S, groups, K // groups, C // groups)."""
    return w.view(problem.groups, -1, w.shape[1], problem.r * problem.s).permute(3, 0, 1, 2)


def _x_pixels(layout: Phases, matrix: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return, for each phase, two views of the same pixels: in the matrix X, and in the image x.

    Both have the shape (n, groups, C // groups, height, width).
    """
    views = []
    for phase, part in enumerate(matrix.unbind(0)):
        image = _as_image(layout, part[:, : part.shape[1] - layout.tail])
        (rows, columns), (x_rows, x_columns) = layout.pixels(phase)
        views.append((image[..., rows, columns], grouped(layout.problem, x)[..., x_rows, x_columns]))
    return views


def _as_image(layout: Phases, matrix: Tensor) -> Tensor:
    """Return a view of a matrix (groups, rows, channels) as images (n, groups, channels, height, width)."""
    groups, _, channels = matrix.shape
    return matrix.view(groups, -1, layout.height, layout.width, channels).permute(1, 0, 4, 2, 3)


ALGORITHMS: tuple[Direct, ...] = (Direct(),)
ON_CUDA: tuple[Direct, ...] = (Direct(device_type="cuda"),)
