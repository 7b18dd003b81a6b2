"""Winograd convolution F(m x m, r x r): fewer multiplications than the direct method (Lavin and Gray 2016).

Images are divided into overlapping tiles. Tiles and filter are transformed, and each of the a x a points becomes a
matrix product over channels. With unit stride, a = m + r - 1, and there are (m r)^2 / a^2 times fewer multiplications.
With a stride, the filter is the sum of its phases (every stride-th element, each phase with unit stride on its own
pixels), and a = stride * (m - 1) + r. The filter is transformed once per call. BACKWARD_DATA uses the filter rotated by
180 degrees; BACKWARD_FILTER sums the transformed gradient over all micro-batches, and transforms it back once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, Sizes, frame_of, taps_and_frames
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace
from mucudnn.kernels.compiled.algorithms import STEP, CompiledAlgorithm, CompiledStage
from mucudnn.kernels.compiled.library import ROWS_OF_FRAMES, Stage, why_not, why_too_large


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of one micro-batch, for a correlation that computes a *target* image from a *source* image.

    With unit stride, tile (i, j) computes m x m target pixels from (i * m, j * m) on. It reads source pixels from
    (i * m - padding[0], j * m - padding[1]) on. Pixels outside the source are zero, pixels outside the target are
    dropped. Channel counts are per group.

    count: number of tiles in the micro-batch.
    """

    groups: int
    source_channels: int
    target_channels: int
    rows: int
    columns: int
    count: int
    padding: Sizes


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


@dataclass(frozen=True, slots=True)
class WinogradAlgorithm(BaseAlgorithm):
    """Winograd convolution F(m x m, r x r) with r x r filters, equal strides in both dimensions, and unit dilation.

    Any padding and any number of groups are supported. ``Winograd`` runs on the CPU, ``CudaWinograd`` on CUDA.
    """

    m: int
    r: int
    stride: int = 1
    version: int = 4
    deterministic: bool = True

    @property
    def name(self) -> str:
        window = "" if self.r == 3 else f"-{self.r}x{self.r}"
        stride = "" if self.stride == 1 else f"-stride{self.stride}"
        return f"winograd-{self.m}x{self.m}{window}{stride}"

    def supports(self, problem: ConvProblem) -> str | None:
        if (problem.r, problem.s) != (self.r, self.r):
            return f"the filter is {problem.r}x{problem.s}; {self.name} is for {self.r}x{self.r}"
        if problem.stride != (self.stride, self.stride):
            stride = f"{problem.stride[0]}x{problem.stride[1]}"
            return f"the stride is {stride}; {self.name} is for {self.stride}x{self.stride}"
        if problem.dilation != (1, 1):
            return f"the dilation is {problem.dilation[0]}x{problem.dilation[1]}; Winograd needs 1x1"
        return None

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        """Return the FLOPs of the products of all tiles, without the transforms (Lavin and Gray 2016, section 4)."""
        tiles, a = tiling(self.m, problem, micro_batch_size), self.stride * (self.m - 1) + self.r
        return 2 * tiles.count * a**2 * tiles.groups * tiles.source_channels * tiles.target_channels


class Winograd(WinogradAlgorithm, CompiledAlgorithm):
    """Winograd convolution on the CPU, in C++ (compiled/winograd/winograd.cpp)."""

    __slots__ = ()
    entry = "winograd"

    @property
    def tile(self) -> int:  # type: ignore[override]
        return self.m

    def supports(self, problem: ConvProblem) -> str | None:
        return super().supports(problem) or why_not(problem, self.entry)

    def band(
        self, problem: ConvProblem, n: int, rows: tuple[int, int], above: int
    ) -> tuple[CompiledStage, Workspace] | None:
        if self.stride > 1 and problem.operation is Operation.BACKWARD_DATA:  # its tiles begin elsewhere
            return None
        return super().band(problem, n, rows, above)


class VolumeWinograd(Winograd):
    """Winograd convolution of volumes on the CPU, whose transforms are of frames.

    A block of tiles is computed in many frames at once: each frame of x is transformed once, the products of a point
    are summed over all taps of the filter's depth, and each frame of y is transformed back once. The filter's stride,
    padding and dilation along the depth are any.
    """

    __slots__ = ()
    takes_volumes = True

    @property
    def name(self) -> str:
        return f"frames-{super().name}"

    def supports(self, problem: ConvProblem) -> str | None:
        if not problem.is_volume:
            return "x has no depth; frames are those of a volume"
        if not taps_and_frames(problem):
            return f"the depth of {problem.d} is all in the padding, so that no frame is read"
        return why_too_large(problem) or super().supports(frame_of(problem))

    def depth(self, problem: ConvProblem) -> tuple[int, int, int, int, int]:
        (stride, *_), (padding, *_), (dilation, *_) = problem.stride, problem.padding, problem.dilation
        used = taps_and_frames(problem)
        first = min(used)
        return stride, padding - first * dilation, dilation, first, max(used) + 1 - first

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        frames = sum(taps_and_frames(problem).values())
        return super().least_flops(frame_of(problem), frames * micro_batch_size)

    def band(
        self, problem: ConvProblem, n: int, rows: tuple[int, int], above: int
    ) -> tuple[CompiledStage, Workspace] | None:
        """Return a callable for some frames, which take the place of rows."""
        stage = self.stage(problem, self.shapes_of_band(problem, n, rows), STEP, slices=[slice(0, n)])
        stage.geometry.pad_d += above - problem.padding[0]
        workspace = self.workspace_of(stage)
        return self.bound_to(problem, stage, workspace), workspace


class RowsWinograd(VolumeWinograd):
    """Winograd convolution of volumes, whose transforms are of the first and the last spatial dimension.

    It is for volumes (N, C, H, D, W), with the rows of all frames together, as graphs have them: their frames are
    images of H rows and W columns. channels_last.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        return super().name.replace("frames", "rows")

    def supports(self, problem: ConvProblem) -> str | None:
        if problem.is_volume and problem.d <= problem.h:
            return f"the depth is {problem.d} and the height {problem.h}; rows before frames are for a larger depth"
        if problem.is_volume and problem.memory_format is MemoryFormat.CONTIGUOUS:
            return "the memory format is contiguous; rows of all frames are together in channels_last"
        return super().supports(_turned(problem) if problem.is_volume else problem)

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return super().least_flops(_turned(problem), micro_batch_size)

    def stage(self, problem: ConvProblem, shapes: Sequence[Sequence[int]], *settings: Any, **named: Any) -> Stage:
        turned = [(n, c, d, h, w) for n, c, h, d, w in shapes]
        stage = super().stage(_turned(problem), turned, *settings, **named)
        for operand in (stage.x, stage.w, stage.y):
            operand.memory_format = ROWS_OF_FRAMES
        return stage

    def band(
        self, problem: ConvProblem, n: int, rows: tuple[int, int], above: int
    ) -> tuple[CompiledStage, Workspace] | None:
        if self.stride > 1 and problem.operation is Operation.BACKWARD_DATA:  # its tiles begin elsewhere
            return None
        return CompiledAlgorithm.band(self, problem, n, rows, above)


@lru_cache(maxsize=1024)
def _turned(problem: ConvProblem) -> ConvProblem:
    """Return a convolution of volumes (N, C, H, D, W) as one of (N, C, D, H, W)."""
    stride, padding, dilation = ((b, a, c) for a, b, c in (problem.stride, problem.padding, problem.dilation))
    return replace(
        problem, d=problem.h, h=problem.d, t=problem.r, r=problem.t, stride=stride, padding=padding, dilation=dilation
    )


UNIT_STRIDE = (
    Winograd(2, 3, version=7),
    *(Winograd(m, r, version=6) for m, r in ((4, 3), (6, 3), (2, 5), (4, 5))),
)
ALGORITHMS = (*UNIT_STRIDE, *(Winograd(m, r, 2, version=6) for m, r in ((2, 3), (4, 3), (4, 5))))
OF_VOLUMES = tuple(
    kind(of_images.m, of_images.r, of_images.stride, version=of_images.version + 1)
    for kind in (VolumeWinograd, RowsWinograd)
    for of_images in ALGORITHMS
)
