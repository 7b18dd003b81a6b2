"""Operators that move: parts of what they read, one behind another, and channels that become rows, or the reverse."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.graph.operators import Band, Operator
from mucudnn.graph.steps import are_images, copy_step, has_rows, step
from mucudnn.kernels.compiled.library import ProgramStep
from mucudnn.solver.bands import Reach


@dataclass(kw_only=True)
class Copy(Operator):
    """A copy, into another memory format, of some channels, rows and columns, or of one for all.

    parts: of each dimension; of samples all, of rows with a start and a step.
    """

    parts: tuple[slice, ...] = (slice(None), slice(None), slice(0, None, 1))

    def reaches(self) -> tuple[Reach, ...]:
        first = np.arange(self.rows) * self.parts[2].step + self.parts[2].start
        return (Reach(self.sources[0], first, first + 1),)

    def _read(self, band: Band) -> Tensor:
        start, step = self.parts[2].start, self.parts[2].step
        first = start + band.low * step - band.starts[0]
        rows = slice(first, first + (band.high - band.low - 1) * step + 1, step)
        return band.xs[0][(*self.parts[:2], rows, *self.parts[3:])].expand(band.out.shape)

    def compute(self, band: Band) -> None:
        band.out.copy_(self._read(band))

    def steps(self, band: Band) -> list[ProgramStep]:
        x = self._read(band)
        return [copy_step(band.out, x)] if has_rows(x) and has_rows(band.out) else []


@dataclass(kw_only=True)
class Concatenation(Operator):
    """Several tensors, one behind another along a dimension, the rows' if it is 2. sizes: of each along it."""

    dim: int
    sizes: tuple[int, ...]

    def reaches(self) -> tuple[Reach, ...]:
        if self.dim != 2:
            return super().reaches()
        every = zip(self.sources, self.sizes, accumulate(self.sizes, initial=0), strict=False)
        found, rows = [], np.arange(self.rows)
        for source, size, start in every:
            found.append(Reach(source, np.clip(rows - start, 0, size), np.clip(rows - start + 1, 0, size)))
        return tuple(found)

    def _parts(self, band: Band) -> list[tuple[Tensor, Tensor]]:
        """Return where some of each tensor goes, and what goes there."""
        if self.dim != 2:
            return [*zip(torch.split(band.out, list(self.sizes), self.dim), band.xs, strict=True)]
        parts, start = [], 0
        for x, first, size in zip(band.xs, band.starts, self.sizes, strict=True):
            low, high = max(band.low, start), min(band.high, start + size)
            if low < high:
                into = band.out[:, :, low - band.low : high - band.low]
                parts.append((into, x[:, :, low - start - first : high - start - first]))
            start += size
        return parts

    def compute(self, band: Band) -> None:
        for part, x in self._parts(band):
            part.copy_(x)

    def steps(self, band: Band) -> list[ProgramStep]:
        parts = self._parts(band)
        return [copy_step(*one) for one in parts] if all(has_rows(part) for part, _ in parts) else []


@dataclass(kw_only=True)
class OneFrame(Operator):
    """Images of clips of one frame, or such clips of images.

    height: rows of what is read, 1 of clips. dim: along which clips have one, 2, or 3 if they are (N, C, H, 1, W).
    """

    height: int
    dim: int = 2

    def reaches(self) -> tuple[Reach, ...]:
        if self.dim == 3:
            return super().reaches()
        first = np.zeros(self.rows, np.int64)
        return (Reach(self.sources[0], first, first + self.height),)

    def _images(self, band: Band) -> tuple[Tensor, Tensor]:
        if band.out.dim() == 5:
            return band.out.select(self.dim, 0), band.xs[0]
        x = band.xs[0].select(self.dim, 0)
        return band.out, x if self.dim == 3 else x[:, :, band.low : band.high]

    def compute(self, band: Band) -> None:
        out, x = self._images(band)
        out.copy_(x)

    def steps(self, band: Band) -> list[ProgramStep]:
        return [copy_step(*self._images(band))]


@dataclass(kw_only=True)
class Shuffle(Operator):
    """Pixels from channels (``factor`` r > 0: each row gives r rows), or the reverse (``factor`` below 0)."""

    factor: int
    settings = ("factor",)

    def reaches(self) -> tuple[Reach, ...]:
        rows, r = np.arange(self.rows), abs(self.factor)
        first, last = (rows // r, rows // r + 1) if self.factor > 0 else (rows * r, rows * r + r)
        return (Reach(self.sources[0], first, last),)

    def compute(self, band: Band) -> None:
        if self.factor < 0:
            band.out.copy_(F.pixel_unshuffle(band.xs[0], -self.factor))
            return
        skipped = band.low - band.starts[0] * self.factor
        band.out.copy_(F.pixel_shuffle(band.xs[0], self.factor)[:, :, skipped : skipped + band.high - band.low])

    def steps(self, band: Band) -> list[ProgramStep]:
        if self.factor < 0 or not are_images(band.out, band.xs[0]):
            return []
        skipped = band.low - band.starts[0] * self.factor
        return [step("shuffle", band.out, band.xs[0], numbers=(self.factor, skipped))]


# For dimension 1 and each of those behind it, strides and sizes of parts of an index along the channels
Moves = tuple[tuple[tuple[int, int], ...], ...]


def depth_to_space(x: Tensor, moved: Moves) -> Tensor:
    """Move channels of (N, C, H, W) or (N, C, D, H, W) into dimensions behind them, and among each other.

    moved: which parts of the channels each dimension has, from 1 on, the slowest first; behind its own index, if it is
    not that of channels.
    """
    sizes = [prod(size for _, size in parts) for parts in moved]
    out = x.new_empty(len(x), *(count * size for count, size in zip((1, *x.shape[2:]), sizes, strict=True)))
    _move_channels(x, moved, out, 0)
    return out


def _move_channels(x: Tensor, moved: Moves, out: Tensor, skipped: int) -> None:
    """Write rows of ``depth_to_space`` without a copy. skipped: how many rows that x gives are before those of out."""
    of_channels, of_rows, *others = moved
    outermost_first = sorted((part for parts in moved for part in parts), reverse=True)
    x = torch.unflatten(x, 1, [size for _, size in outermost_first])
    dims = {part: 1 + index for index, part in enumerate(outermost_first)}
    behind, every, pieces = 1 + len(dims), prod(size for _, size in of_rows), []
    if skipped % every == 0 == out.shape[2] % every:
        pieces = [(out, x.narrow(behind, skipped // every, out.shape[2] // every))]
    else:
        for residue in range(every):
            first, rest = (residue - skipped) % every, residue
            into = out[:, :, first::every]
            part = x.narrow(behind, (first + skipped) // every, into.shape[2])
            for one in reversed(of_rows):
                rest, index = divmod(rest, one[1])
                part = part.narrow(dims[one], index, 1)
            pieces.append((into, part))
    order = [0, *(dims[part] for part in of_channels)]
    for index, parts in enumerate((of_rows, *others)):
        order += [behind + index, *(dims[one] for one in parts)]
    for into, part in pieces:
        for index, parts in reversed([*enumerate((of_rows, *others))]):
            sizes = [part.shape[behind + index], *(part.shape[dims[one]] for one in parts)]
            into = torch.unflatten(into, 2 + index, sizes)
        into = torch.unflatten(into, 1, [size for _, size in of_channels] or [1])
        part = part.permute(order)
        into.copy_(part if of_channels else part.unsqueeze(1))


@dataclass(kw_only=True)
class DepthToSpace(Operator):
    """``depth_to_space``: each row gives as many as the sizes of the parts that it gets multiply to."""

    moved: Moves
    settings = ("moved",)

    @property
    def rows_of_row(self) -> int:
        return prod(size for _, size in self.moved[1])

    def reaches(self) -> tuple[Reach, ...]:
        row = np.arange(self.rows) // self.rows_of_row
        return (Reach(self.sources[0], row, row + 1),)

    def compute(self, band: Band) -> None:
        _move_channels(band.xs[0], self.moved, band.out, band.low - band.starts[0] * self.rows_of_row)
