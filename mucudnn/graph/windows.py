"""Operators that read other rows than those that they write: pooling, padding, resizing, convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.problem import Sizes
from mucudnn.graph.operators import Band, Operator, aten
from mucudnn.graph.steps import are_images, copy_step, step
from mucudnn.kernels.compiled.library import ProgramStep
from mucudnn.solver.bands import Indices, Reach

_COUNTS_PADDING, _COUNTS_IMAGE = 0, -1
_NEAREST = ("nearest", "nearest-exact")


def windows(rows: int, height: int, stride: int, padding: int, extent: int) -> tuple[Indices, Indices]:
    """Return the first and behind the last input row that each output row reads, of ``height``, through a window.

    A window that lies in the padding reads the nearest row.
    """
    start = np.arange(rows) * stride - padding
    first = np.clip(start, 0, height - 1)
    return first, np.clip(start + extent, first + 1, height)


@dataclass(kw_only=True)
class Pool(Operator):
    """Base class. kernel, stride, padding: of (frames,) rows and columns. height: of what is read."""

    kernel: Sizes
    stride: Sizes
    padding: Sizes
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
        least = 1
        if len(self.kernel) == 3:  # torch's operator wants as many frames as the kernel has, without padding
            least = self.kernel[0]
            first = np.minimum(first, (self.height - least) // stride * stride)
        last = np.clip(rows * stride - padding + self.kernel[0], first + least, self.height)
        return (Reach(self.sources[0], first, last),)

    def compute(self, band: Band) -> None:
        x, skipped = band.xs[0], band.low - band.starts[0] // self.stride[0]
        if self.kernel == (self.height, *x.shape[3:]) and not any(self.padding) and self.divisor is None:
            band.out.copy_(x.mean([*range(2, x.dim())], keepdim=True))  # more precise than a sum in order
            return
        pool = F.avg_pool2d if x.dim() == 4 else F.avg_pool3d
        y = pool(x, self.kernel, self.stride, self.padding, self.ceil_mode, self.counts_padding, self.divisor)
        band.out.copy_(y[:, :, skipped : skipped + band.high - band.low])

    def steps(self, band: Band) -> list[ProgramStep]:
        if len(self.kernel) > 2 or not are_images(band.out, band.xs[0]):
            return []
        top = band.low * self.stride[0] - self.padding[0] - band.starts[0]
        divisor = self.divisor or (_COUNTS_PADDING if self.counts_padding else _COUNTS_IMAGE)
        corner, height = (top, -self.padding[1]), self.height - band.starts[0]
        numbers = *self.kernel, *self.stride, 1, 1, *corner, height, *self.padding, divisor
        return [step("average_pool", band.out, band.xs[0], numbers=numbers)]


@dataclass(kw_only=True)
class MaxPool(Pool):
    """The largest number of each window. dilation: as the stride."""

    dilation: Sizes

    def reaches(self) -> tuple[Reach, ...]:
        extent = self.dilation[0] * (self.kernel[0] - 1) + 1
        return (Reach(self.sources[0], *windows(self.rows, self.height, self.stride[0], self.padding[0], extent)),)

    def compute(self, band: Band) -> None:
        x, sides = band.xs[0], list[int]()
        starts = band.starts[0] - band.low * self.stride[0] + self.padding[0], *self.padding[1:]
        for dimension, before in reversed([*enumerate(starts)]):  # columns, then rows, as F.pad takes them
            extent = self.dilation[dimension] * (self.kernel[dimension] - 1) + 1
            last = (band.out.shape[2 + dimension] - 1) * self.stride[dimension] + extent
            sides += [before, last - before - x.shape[2 + dimension]]
        padded = F.pad(x, sides, value=-torch.inf)
        pool = F.max_pool2d if x.dim() == 4 else F.max_pool3d
        band.out.copy_(pool(padded, self.kernel, self.stride, 0, self.dilation))

    def steps(self, band: Band) -> list[ProgramStep]:
        if len(self.kernel) > 2 or not are_images(band.out, band.xs[0]):
            return []
        top = band.low * self.stride[0] - self.padding[0] - band.starts[0]
        numbers = *self.kernel, *self.stride, *self.dilation, top, -self.padding[1]
        return [step("max_pool", band.out, band.xs[0], numbers=numbers)]


@dataclass(kw_only=True)
class Padding(Operator):
    """Padding of rows and columns by zeros, another value, or the image reflected or replicated.

    sides: left, right, above, below, of volumes then frames before and behind, none negative. source_rows: for each row
    of the result, the row of the input that it comes from, or -1. constant: ``value`` as a tensor, to copy from.
    """

    sides: Sizes
    mode: str
    value: float
    source_rows: Indices = field(init=False)
    constant: Tensor = field(init=False)
    settings = ("mode",)

    def __post_init__(self) -> None:
        self.constant = torch.tensor(self.value, dtype=self.dtype, device=self.device)
        sides = self.sides[-2:]
        rows = np.arange(self.rows - sum(sides))
        if self.mode == "constant":
            self.source_rows = np.pad(rows, sides, constant_values=-1)
        else:
            self.source_rows = np.pad(rows, sides, mode="reflect" if self.mode == "reflect" else "edge")

    def reaches(self) -> tuple[Reach, ...]:
        rows = self.source_rows
        first = np.where(rows < 0, self.rows - sum(self.sides[-2:]), rows)
        return (_monotone(self.sources[0], first, np.where(rows < 0, 0, rows + 1)),)

    def _copies(self, band: Band) -> list[tuple[Tensor, Tensor]]:
        """Return where to copy, and what: runs of adjacent rows first, then the borders of rows from beside them."""
        x, out, wanted = band.xs[0], band.out, self.source_rows[band.low : band.high]
        borders = [(-1 - i // 2, *self.sides[i : i + 2]) for i in range(0, len(self.sides) - 2, 2)]
        inner, made = out, []
        for dim, before, after in borders:
            inner = inner.narrow(dim, before, inner.shape[dim] - before - after)
        ends = np.flatnonzero((np.diff(wanted) != 1) | (wanted[:-1] < 0)) + 1
        for run in np.split(np.arange(len(wanted)), ends):
            into, first = inner.narrow(2, int(run[0]), len(run)), int(wanted[run[0]])
            made.append((into, self.constant if first < 0 else x.narrow(2, first - band.starts[0], len(run))))
        for index, (dim, before, after) in enumerate(borders):
            part = out
            for other, low, high in borders[index + 1 :]:  # whose borders are not written yet
                part = part.narrow(other, low, part.shape[other] - low - high)
            last = part.shape[dim] - after - 1
            if self.mode == "reflect":
                moved = [(before - i, before + i, 1) for i in range(1, before + 1)]
                moved += [(last + i, last - i, 1) for i in range(1, after + 1)]
            else:
                moved = [(0, before, before), (last + 1, last, after)]
            for to, source, count in moved:
                what = self.constant if self.mode == "constant" else part.narrow(dim, source, 1)
                made.append((part.narrow(dim, to, count), what))
        return [(into, what.expand_as(into)) for into, what in made if into.numel()]

    def compute(self, band: Band) -> None:
        for into, what in self._copies(band):
            into.copy_(what)

    def steps(self, band: Band) -> list[ProgramStep]:
        every = [(into, what) for pair in self._copies(band) for into, what in zip(*map(_images, pair), strict=True)]
        return [copy_step(*pair) for pair in every]


def _images(x: Tensor) -> Sequence[Tensor]:
    """Return the frames of volumes, as images."""
    return x.unbind(2) if x.dim() == 5 else [x]


@dataclass(kw_only=True)
class Resize(Operator):
    """Nearest, nearest-exact, bilinear or trilinear resizing: of each row or frame by torch, then rows or frames.

    Interpolated rows are sums of two.

    The coordinates are computed in float64, by torch's formulas (area_pixel_compute_source_index). size: spatial sizes
    of what is read. above, below, weights: of each row of the result, the rows on both sides, and the weight of the
    second.
    """

    mode: str
    align_corners: bool
    scales: tuple[float | None, ...]
    size: Sizes
    above: Indices = field(init=False)
    below: Indices = field(init=False)
    weights: NDArray[np.float64] = field(init=False)
    settings = ("mode",)

    def __post_init__(self) -> None:
        self.above, self.below, self.weights = self._sources(0)

    def _sources(self, dimension: int) -> tuple[Indices, Indices, NDArray[np.float64]]:
        """Return the numbers on both sides, and the weight of the second, along a dimension: 0 for rows or frames."""
        size, outputs, scale = self.size[dimension], self.shape[2 + dimension], self.scales[dimension]
        if self.mode in _NEAREST:
            numbers = torch.arange(size, dtype=torch.float32, device="cpu").view(1, 1, size, 1)
            near = _resizing(self.mode, 2)(numbers, [outputs, 1], scale, None).flatten().long().numpy()
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
        size, scales = [x.shape[2], *self.shape[3:]], (None, *self.scales[1:])
        if self.mode in _NEAREST and len(size) > 2:
            for frame, nearest in enumerate(self.above[rows] - start):
                resized = _resizing(self.mode, 2)(x[:, :, nearest], size[1:], *scales[1:])
                band.out[:, :, frame].copy_(resized)
            return
        resize = _resizing(self.mode, len(self.size))
        if self.mode in _NEAREST:
            if x.shape[3:] != self.shape[3:]:
                x = resize(x, size, *scales)
            torch.index_select(x, 2, torch.from_numpy(self.above[rows] - start).to(x.device), out=band.out)
            return
        x = resize(x, size, self.align_corners, *scales)
        above = x.index_select(2, torch.from_numpy(self.above[rows] - start).to(x.device))
        below = x.index_select(2, torch.from_numpy(self.below[rows] - start).to(x.device))
        weights = torch.from_numpy(self.weights[rows]).to(x.device, x.dtype).view(-1, *(1,) * (x.dim() - 3))
        torch.lerp(above, below, weights, out=band.out)

    def steps(self, band: Band) -> list[ProgramStep]:
        out, x, is_nearest = band.out, band.xs[0], self.mode in _NEAREST
        if not are_images(out, x) or (len(self.size) > 2 and not is_nearest):
            return []
        above, below = (some[band.low : band.high] - band.starts[0] for some in (self.above, self.below))
        along_rows = above, below, self.weights[band.low : band.high]
        images = [(out, x)]
        if len(self.size) > 2:
            along_rows = self._sources(1)
            images = [(out[:, :, frame], x[:, :, nearest]) for frame, nearest in enumerate(above)]
        kept = [
            np.ascontiguousarray(table, np.float32 if table.dtype == np.float64 else None)
            for table in (*along_rows, *self._sources(len(self.size) - 1))
        ]
        return [step("resize", *each, numbers=(not is_nearest,), tables=kept) for each in images]


def _resizing(mode: str, dimensions: int) -> Any:
    """Return torch's operator of a mode."""
    name = "_upsample_nearest_exact" if mode == "nearest-exact" else f"upsample_{mode}"
    return getattr(aten, f"{name}{dimensions}d").default


def _monotone(source: int, first: Indices, last: Indices) -> Reach:
    """Return a reach whose rows do not decrease from one row of the result to the next, which contains the given."""
    return Reach(source, np.minimum.accumulate(first[::-1])[::-1], np.maximum.accumulate(last))
