"""Operators that read other rows than those that they write: pooling, padding, resizing, convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.problem import Sizes
from mucudnn.graph.operators.operator import Band, Operator, aten
from mucudnn.graph.operators.steps import are_images, copy_step, step
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool(Operator):
    """Base class.

    kernel: of (frames,) rows and columns, as the stride and the padding.
    size: of what is read, likewise.
    """

    kernel: Sizes
    stride: Sizes
    padding: Sizes
    size: Sizes
    settings = ("kernel", "stride")


@dataclass(frozen=True, kw_only=True, eq=False)
class AveragePool(Pool):
    """Average pooling.

    A band begins at a row from which the windows of torch's operator are those of the whole; rows beyond it are
    dropped.

    divisor: None for the size of the window.
    """

    ceil_mode: bool = False
    counts_padding: bool = True
    divisor: int | None = None

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        rows, size = np.arange(self.shape[2 + dim]), self.size[dim]
        stride, padding = self.stride[dim], self.padding[dim]
        first = np.clip((rows - ceil(padding / stride)) * stride, 0, size - 1)
        least = 1
        if len(self.kernel) == 3:  # torch's operator wants as many frames as the kernel has, without padding
            least = self.kernel[dim]
            first = np.minimum(first, (size - least) // stride * stride)
        last = np.clip(rows * stride - padding + self.kernel[dim], first + least, size)
        return (Reach(self.sources[0], first, last),)

    def compute(self, band: Band) -> None:
        x, skipped = band.xs[0], band.low - band.starts[0] // self.stride[0]
        if self.kernel == (self.size[0], *x.shape[3:]) and not any(self.padding) and self.divisor is None:
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
        corner, height = (top, -self.padding[1]), self.size[0] - band.starts[0]
        numbers = *self.kernel, *self.stride, 1, 1, *corner, height, *self.padding, divisor
        return [step("average_pool", band.out, band.xs[0], numbers=numbers)]


@dataclass(frozen=True, kw_only=True, eq=False)
class MaxPool(Pool):
    """The largest number of each window.

    dilation: of (frames,) rows and columns.
    """

    dilation: Sizes

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        extent = self.dilation[dim] * (self.kernel[dim] - 1) + 1
        read = windows(self.shape[2 + dim], self.size[dim], self.stride[dim], self.padding[dim], extent)
        return (Reach(self.sources[0], *read),)

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Padding(Operator):
    """Padding of rows and columns by a constant, or the image reflected or replicated.

    sides: left, right, above, below, of volumes then frames before and behind, none negative.
    mode: constant, reflect or replicate.
    constant: the constant as a tensor, to copy from.
    """

    sides: Sizes
    mode: str
    constant: Tensor
    settings = ("mode",)

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        padded, sides = self.shape[2 + dim], self.sides[::-1][2 * dim : 2 * dim + 2][::-1]
        rows = _padded_rows(padded, sides, self.mode)
        first = np.where(rows < 0, padded - sum(sides), rows)
        return (_monotone(self.sources[0], first, np.where(rows < 0, 0, rows + 1)),)

    def _copies(self, band: Band) -> list[tuple[Tensor, Tensor]]:
        """Return where to copy, and what: runs of adjacent rows first, then the borders of rows from beside them."""
        x, out, copies = band.xs[0], band.out, list[tuple[Tensor, Tensor]]()
        borders = [(-1 - i // 2, *self.sides[i : i + 2]) for i in range(0, len(self.sides) - 2, 2)]
        # Rows, without their borders
        inner = out
        for dim, before, after in borders:
            inner = inner.narrow(dim, before, inner.shape[dim] - before - after)
        rows = _padded_rows(self.rows, self.sides[-2:], self.mode)[band.low : band.high]
        ends = np.flatnonzero((np.diff(rows) != 1) | (rows[:-1] < 0)) + 1
        for run in np.split(np.arange(len(rows)), ends):
            into, first = inner.narrow(2, int(run[0]), len(run)), int(rows[run[0]])
            copies.append((into, self.constant if first < 0 else x.narrow(2, first - band.starts[0], len(run))))
        # The borders of each dimension, within those that are written already
        for index, (dim, before, after) in enumerate(borders):
            part = out
            for unwritten, low, high in borders[index + 1 :]:
                part = part.narrow(unwritten, low, part.shape[unwritten] - low - high)
            last = part.shape[dim] - after - 1
            if self.mode == "reflect":
                places = [(before - i, before + i, 1) for i in range(1, before + 1)]
                places += [(last + i, last - i, 1) for i in range(1, after + 1)]
            else:
                places = [(0, before, before), (last + 1, last, after)]
            for place, source, count in places:
                value = self.constant if self.mode == "constant" else part.narrow(dim, source, 1)
                copies.append((part.narrow(dim, place, count), value))
        return [(into, value.expand_as(into)) for into, value in copies if into.numel()]

    def compute(self, band: Band) -> None:
        for into, value in self._copies(band):
            into.copy_(value)

    def steps(self, band: Band) -> list[ProgramStep]:
        return [
            copy_step(image, value)
            for copied in self._copies(band)
            for image, value in zip(*map(_images, copied), strict=True)
        ]


@lru_cache(maxsize=64)
def _padded_rows(rows: int, sides: Sizes, mode: str) -> Indices:
    """Return the row of the input that each of so many rows of a ``Padding`` comes from; -1 for a constant."""
    padded = np.arange(rows - sum(sides))
    if mode == "constant":
        return np.pad(padded, sides, constant_values=-1)
    return np.pad(padded, sides, mode="reflect" if mode == "reflect" else "edge")


def _images(x: Tensor) -> Sequence[Tensor]:
    """Return the frames of volumes, as images."""
    return x.unbind(2) if x.dim() == 5 else [x]


@dataclass(frozen=True, kw_only=True, eq=False)
class Resize(Operator):
    """Nearest, nearest-exact, bilinear or trilinear resizing: of each row or frame by torch, then rows or frames.

    Interpolated rows are sums of two.

    scales: of each spatial dimension; None for the ratio of its sizes.
    size: spatial sizes of what is read.
    """

    mode: str
    align_corners: bool
    scales: tuple[float | None, ...]
    size: Sizes
    settings = ("mode",)

    def neighbors(self, dimension: int) -> Neighbors:
        """Return the neighbors along a dimension: 0 for rows or frames."""
        sizes = self.size[dimension], self.shape[2 + dimension]
        return _neighbors(self.mode, *sizes, self.scales[dimension], aligns_corners=self.align_corners)

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        above, below, _ = self.neighbors(dim)
        return (_monotone(self.sources[0], above, below + 1),)

    def compute(self, band: Band) -> None:
        x, start, rows = band.xs[0], band.starts[0], slice(band.low, band.high)
        size, scales = [x.shape[2], *self.shape[3:]], (None, *self.scales[1:])
        above, below, weights = (along_rows[rows] for along_rows in self.neighbors(0))
        if self.mode in _NEAREST and len(size) > 2:
            for frame, nearest in enumerate(above - start):
                resized = _resizing(self.mode, 2)(x[:, :, nearest], size[1:], *scales[1:])
                band.out[:, :, frame].copy_(resized)
            return
        resize = _resizing(self.mode, len(self.size))
        if self.mode in _NEAREST:
            if x.shape[3:] != self.shape[3:]:
                x = resize(x, size, *scales)
            torch.index_select(x, 2, torch.from_numpy(above - start).to(x.device), out=band.out)
            return
        x = resize(x, size, self.align_corners, *scales)
        first, second = (x.index_select(2, torch.from_numpy(near - start).to(x.device)) for near in (above, below))
        share = torch.from_numpy(weights).to(x.device, x.dtype).view(-1, *(1,) * (x.dim() - 3))
        torch.lerp(first, second, share, out=band.out)

    def steps(self, band: Band) -> list[ProgramStep]:
        out, x, is_nearest = band.out, band.xs[0], self.mode in _NEAREST
        if not are_images(out, x) or (len(self.size) > 2 and not is_nearest):
            return []
        above, below, weights = (along_rows[band.low : band.high] for along_rows in self.neighbors(0))
        above, below = above - band.starts[0], below - band.starts[0]
        along_rows, images = (above, below, weights), [(out, x)]
        if len(self.size) > 2:
            along_rows = self.neighbors(1)
            images = [(out[:, :, frame], x[:, :, nearest]) for frame, nearest in enumerate(above)]
        tables = [
            np.ascontiguousarray(table, np.float32 if table.dtype == np.float64 else None)
            for table in (*along_rows, *self.neighbors(len(self.size) - 1))
        ]
        return [step("resize", into, image, numbers=(not is_nearest,), tables=tables) for into, image in images]


# Of each row of a result, the rows on both sides, and the weight of the second
Neighbors: TypeAlias = tuple[Indices, Indices, NDArray[np.float64]]


@lru_cache(maxsize=64)
def _neighbors(mode: str, size: int, outputs: int, scale: float | None, *, aligns_corners: bool) -> Neighbors:
    """Return the neighbors of a dimension of ``outputs`` numbers, resized from ``size``.

    Coordinates are computed in float64, by torch's formulas (area_pixel_compute_source_index).
    """
    if mode in _NEAREST:
        numbers = torch.arange(size, dtype=torch.float32, device="cpu").view(1, 1, size, 1)
        nearest = _resizing(mode, 2)(numbers, [outputs, 1], scale, None).flatten().long().numpy()
        return nearest, nearest, np.zeros(outputs)
    places = np.arange(outputs, dtype=np.float64)
    if aligns_corners:
        places = places * ((size - 1) / (outputs - 1) if outputs > 1 else 0.0)
    else:
        places = np.maximum((places + 0.5) * (1 / scale if scale else size / outputs) - 0.5, 0)
    before = np.minimum(places.astype(np.int64), size - 1)
    return before, np.minimum(before + 1, size - 1), np.clip(places - before, 0, 1)


def _resizing(mode: str, dimensions: int) -> Any:
    """Return torch's operator of a mode."""
    name = "_upsample_nearest_exact" if mode == "nearest-exact" else f"upsample_{mode}"
    return getattr(aten, f"{name}{dimensions}d").default


def _monotone(source: int, first: Indices, last: Indices) -> Reach:
    """Return a reach whose rows do not decrease from one row of the result to the next, which contains the given."""
    return Reach(source, np.minimum.accumulate(first[::-1])[::-1], np.maximum.accumulate(last))
