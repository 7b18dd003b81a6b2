"""Operators that read other rows than those that they write: pooling, padding, resizing."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from mucudnn.graph.operators import Band, Operator, aten
from mucudnn.graph.steps import are_float, step
from mucudnn.kernels.compiled.library import ProgramStep
from mucudnn.solver.bands import Indices, Reach

_COUNTS_PADDING, _COUNTS_IMAGE = 0, -1


def windows(rows: int, height: int, stride: int, padding: int, extent: int) -> tuple[Indices, Indices]:
    """Return the first and behind the last input row that each output row reads, of ``height``, through a window.

    A window that lies in the padding reads the nearest row.
    """
    start = np.arange(rows) * stride - padding
    first = np.clip(start, 0, height - 1)
    return first, np.clip(start + extent, first + 1, height)


@dataclass(kw_only=True)
class Pool(Operator):
    """Base class. kernel, stride, padding: of rows and of columns. height: of the image that is read."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    height: int
    settings = ("kernel", "stride")


@dataclass(kw_only=True)
class AveragePool(Pool):
    """Average pooling. divisor: None for the size of the window.

    A band begins at a row from which the windows of torch's operator are those of the whole; rows beyond it are
    dropped.
    """

    ceil_mode: bool = False
    counts_padding: bool = True
    divisor: int | None = None

    def reaches(self) -> tuple[Reach, ...]:
        rows, stride, padding = np.arange(self.rows), self.stride[0], self.padding[0]
        first = np.clip((rows - ceil(padding / stride)) * stride, 0, self.height - 1)
        last = np.clip(rows * stride - padding + self.kernel[0], first + 1, self.height)
        return (Reach(self.sources[0], first, last),)

    def compute(self, band: Band) -> None:
        x, skipped = band.xs[0], band.low - band.starts[0] // self.stride[0]
        if self.kernel == x.shape[2:] and not any(self.padding) and self.divisor is None:
            band.out.copy_(x.mean((2, 3), keepdim=True))  # more precise than a sum in order
            return
        y = F.avg_pool2d(x, self.kernel, self.stride, self.padding, self.ceil_mode, self.counts_padding, self.divisor)
        band.out.copy_(y[:, :, skipped : skipped + band.high - band.low])

    def steps(self, band: Band) -> list[ProgramStep]:
        if not are_float(band.out, band.xs[0]):
            return []
        top = band.low * self.stride[0] - self.padding[0] - band.starts[0]
        divisor = self.divisor or (_COUNTS_PADDING if self.counts_padding else _COUNTS_IMAGE)
        corner, height = (top, -self.padding[1]), self.height - band.starts[0]
        numbers = *self.kernel, *self.stride, 1, 1, *corner, height, *self.padding, divisor
        return [step("average_pool", band.out, band.xs[0], numbers=numbers)]


@dataclass(kw_only=True)
class MaxPool(Pool):
    """The largest number of each window. dilation: of rows and of columns."""

    dilation: tuple[int, int]

    def reaches(self) -> tuple[Reach, ...]:
        extent = self.dilation[0] * (self.kernel[0] - 1) + 1
        return (Reach(self.sources[0], *windows(self.rows, self.height, self.stride[0], self.padding[0], extent)),)

    def compute(self, band: Band) -> None:
        x, sides = band.xs[0], []
        starts = self.padding[1], band.starts[0] - band.low * self.stride[0] + self.padding[0]
        for dimension, before in zip((1, 0), starts, strict=True):  # columns, then rows, as F.pad takes them
            extent = self.dilation[dimension] * (self.kernel[dimension] - 1) + 1
            last = (band.out.shape[2 + dimension] - 1) * self.stride[dimension] + extent
            sides += [before, last - before - x.shape[2 + dimension]]
        padded = F.pad(x, sides, value=-torch.inf)
        band.out.copy_(F.max_pool2d(padded, self.kernel, self.stride, 0, self.dilation))

    def steps(self, band: Band) -> list[ProgramStep]:
        if not are_float(band.out, band.xs[0]):
            return []
        top = band.low * self.stride[0] - self.padding[0] - band.starts[0]
        numbers = *self.kernel, *self.stride, *self.dilation, top, -self.padding[1]
        return [step("max_pool", band.out, band.xs[0], numbers=numbers)]


@dataclass(kw_only=True)
class Padding(Operator):
    """Padding of rows and columns by zeros, another value, or the image reflected or replicated.

    sides: left, right, above, below, none negative. source_rows: for each row of the result, the row of the input that
    it comes from, or -1.
    """

    sides: tuple[int, int, int, int]
    mode: str
    value: float
    source_rows: Indices = field(init=False)
    settings = ("mode",)

    def __post_init__(self) -> None:
        sides = self.sides[2:]
        rows = np.arange(self.rows - sum(sides))
        if self.mode == "constant":
            self.source_rows = np.pad(rows, sides, constant_values=-1)
        else:
            self.source_rows = np.pad(rows, sides, mode="reflect" if self.mode == "reflect" else "edge")

    def reaches(self) -> tuple[Reach, ...]:
        rows = self.source_rows
        first = np.where(rows < 0, self.rows - sum(self.sides[2:]), rows)
        return (_monotone(self.sources[0], first, np.where(rows < 0, 0, rows + 1)),)

    def compute(self, band: Band) -> None:
        left, right, _, _ = self.sides
        x, start = band.xs[0], band.starts[0]
        wanted = self.source_rows[band.low : band.high]
        if self.mode == "constant":
            inside = np.flatnonzero(wanted >= 0)
            if len(inside) < len(wanted):
                band.out.fill_(self.value)
            if len(inside):
                first = int(inside[0])
                rows = x[:, :, int(wanted[first]) - start :][:, :, : len(inside)]
                band.out[:, :, first : first + len(inside)].copy_(F.pad(rows, (left, right, 0, 0), value=self.value))
            return
        rows = x.index_select(2, torch.from_numpy(wanted - start).to(x.device))
        band.out.copy_(F.pad(rows, (left, right, 0, 0), self.mode) if left or right else rows)


@dataclass(kw_only=True)
class Resize(Operator):
    """Nearest or bilinear resizing: columns by torch, then rows as sums of two.

    The coordinates are computed in float64, by torch's formulas (area_pixel_compute_source_index). size: rows and
    columns of the image that is read. above, below, weights: of each row of the result, the rows on both sides, and the
    weight of the second.
    """

    mode: str
    align_corners: bool
    scales: tuple[float | None, float | None]
    size: tuple[int, int]
    above: Indices = field(init=False)
    below: Indices = field(init=False)
    weights: NDArray[np.float64] = field(init=False)
    settings = ("mode",)

    def __post_init__(self) -> None:
        self.above, self.below, self.weights = self._sources(0)

    def _sources(self, dimension: int) -> tuple[Indices, Indices, NDArray[np.float64]]:
        """Return the numbers on both sides, and the weight of the second, of rows (0) or columns (1)."""
        size, outputs, scale = self.size[dimension], self.shape[2 + dimension], self.scales[dimension]
        if self.mode == "nearest":
            numbers = torch.arange(size, dtype=torch.float32, device="cpu").view(1, 1, size, 1)
            near = aten.upsample_nearest2d.default(numbers, [outputs, 1], scale, None).flatten().long().numpy()
            return near, near, np.zeros(outputs)
        at = np.arange(outputs, dtype=np.float64)
        if self.align_corners:
            at = at * ((size - 1) / (outputs - 1) if outputs > 1 else 0.0)
        else:
            at = np.maximum((at + 0.5) * (1 / scale if scale else size / outputs) - 0.5, 0)
        before = np.minimum(at.astype(np.int64), size - 1)
        return before, np.minimum(before + 1, size - 1), np.clip(at - before, 0, 1)

    def reaches(self) -> tuple[Reach, ...]:
        return (_monotone(self.sources[0], self.above, self.below + 1),)

    def compute(self, band: Band) -> None:
        x, start, rows = band.xs[0], band.starts[0], slice(band.low, band.high)
        width = self.shape[3]
        if self.mode == "nearest":
            if width != x.shape[3]:
                x = aten.upsample_nearest2d.default(x, [x.shape[2], width], None, self.scales[1])
            torch.index_select(x, 2, torch.from_numpy(self.above[rows] - start).to(x.device), out=band.out)
            return
        x = aten.upsample_bilinear2d.default(x, [x.shape[2], width], self.align_corners, None, self.scales[1])
        above = x.index_select(2, torch.from_numpy(self.above[rows] - start).to(x.device))
        below = x.index_select(2, torch.from_numpy(self.below[rows] - start).to(x.device))
        weights = torch.from_numpy(self.weights[rows]).to(x.device, x.dtype).view(1, 1, -1, 1)
        torch.lerp(above, below, weights, out=band.out)

    def steps(self, band: Band) -> list[ProgramStep]:
        if not are_float(band.out, band.xs[0]):
            return []
        rows = slice(band.low, band.high)
        above, below = (some[rows] - band.starts[0] for some in (self.above, self.below))
        left, right, weights = self._sources(1)
        tables = above, below, self.weights[rows].astype(np.float32), left, right, weights.astype(np.float32)
        kept = [np.ascontiguousarray(table) for table in tables]
        return [step("resize", band.out, band.xs[0], numbers=(self.mode == "bilinear",), tables=kept)]


def _monotone(source: int, first: Indices, last: Indices) -> Reach:
    """Return a reach whose rows do not decrease from one row of the result to the next, which contains the given."""
    return Reach(source, np.minimum.accumulate(first[::-1])[::-1], np.maximum.accumulate(last))
