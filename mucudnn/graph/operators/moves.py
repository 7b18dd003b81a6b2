"""Operators that move: parts of what they read, one behind another, and channels that become rows, or the reverse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mucudnn.graph.operators.operator import Band, Operator
from mucudnn.graph.operators.steps import are_images, copy_step, has_rows, step
from mucudnn.kernels.compiled.library import ProgramStep
from mucudnn.solver.bands import Reach


@dataclass(frozen=True, kw_only=True, eq=False)
class Copy(Operator):
    """A copy, into another memory format, of some channels, rows and columns, or of one for all.

    parts: of each dimension; of samples all, of rows with a start and a step.
    """

    parts: tuple[slice, ...] = (slice(None), slice(None), slice(0, None, 1))

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        if len(self.parts) <= 2 + dim:
            return super().reaches(dim)
        part = self.parts[2 + dim]
        first = (part.start or 0) + np.arange(self.shape[2 + dim]) * (part.step or 1)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Concatenation(Operator):
    """Several tensors, one behind another.

    dim: along which dimension; that of the rows is 2.
    sizes: of the tensors along it.
    """

    dim: int
    sizes: tuple[int, ...]

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        if self.dim != 2 + dim:
            return super().reaches(dim)
        rows = np.arange(self.shape[self.dim])
        return tuple(
            Reach(source, np.clip(rows - start, 0, size), np.clip(rows - start + 1, 0, size))
            for source, size, start in zip(self.sources, self.sizes, accumulate(self.sizes, initial=0), strict=False)
        )

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
        return [copy_step(part, x) for part, x in parts] if all(has_rows(part) for part, _ in parts) else []


@dataclass(frozen=True, kw_only=True, eq=False)
class Shuffle(Operator):
    """Pixels from channels (``factor`` r > 0: each row gives r rows), or the reverse (``factor`` below 0)."""

    factor: int
    settings = ("factor",)

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        rows, r = np.arange(self.shape[2 + dim]), abs(self.factor)
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


# The stride and the size of a part of an index along the channels, and such parts for dimension 1 and all behind it
Part: TypeAlias = tuple[int, int]
Moves: TypeAlias = tuple[tuple[Part, ...], ...]


def size_of(parts: Iterable[Part]) -> int:
    """Return how many channels a dimension gets."""
    return prod(size for _, size in parts)


def depth_to_space(x: Tensor, moved: Moves) -> Tensor:
    """Move channels of (N, C, H, W) or (N, C, D, H, W) into dimensions behind them, and among each other.

    moved: which parts of the channels each dimension has, from 1 on, the slowest first; behind its own index, if it is
    not that of channels.
    """
    lengths = [length * size_of(parts) for length, parts in zip((1, *x.shape[2:]), moved, strict=True)]
    out = x.new_empty(len(x), *lengths)
    _move_channels(x, moved, out, 0)
    return out


def _move_channels(x: Tensor, moved: Moves, out: Tensor, skipped: int) -> None:
    """Write rows of ``depth_to_space`` without a copy.

    skipped: how many rows that x gives are before those of out.
    """
    channel_parts, *behind_channels = moved
    row_parts = behind_channels[0]
    # Each part of the channels as a dimension of x, before its rows
    outermost_first = sorted(chain.from_iterable(moved), reverse=True)
    x = torch.unflatten(x, 1, [size for _, size in outermost_first])
    dims = {part: 1 + index for index, part in enumerate(outermost_first)}
    first_dim = 1 + len(dims)
    order = [0, *(dims[part] for part in channel_parts)]
    for index, parts in enumerate(behind_channels):
        order += [first_dim + index, *(dims[part] for part in parts)]
    # All rows at once if each row of x gives all of its rows, else those of each residue
    period, copies = size_of(row_parts), list[tuple[Tensor, Tensor]]()
    if skipped % period == 0 == out.shape[2] % period:
        copies = [(out, x.narrow(first_dim, skipped // period, out.shape[2] // period))]
    else:
        for residue in range(period):
            first, quotient = (residue - skipped) % period, residue
            into = out[:, :, first::period]
            piece = x.narrow(first_dim, (first + skipped) // period, into.shape[2])
            for part in reversed(row_parts):
                quotient, index = divmod(quotient, part[1])
                piece = piece.narrow(dims[part], index, 1)
            copies.append((into, piece))
    # Dimensions of out are divided as those of x are
    for into, piece in copies:
        for index, parts in reversed([*enumerate(behind_channels)]):
            sizes = [piece.shape[first_dim + index], *(piece.shape[dims[part]] for part in parts)]
            into = torch.unflatten(into, 2 + index, sizes)
        into = torch.unflatten(into, 1, [size for _, size in channel_parts] or [1])
        piece = piece.permute(order)
        into.copy_(piece if channel_parts else piece.unsqueeze(1))


@dataclass(frozen=True, kw_only=True, eq=False)
class DepthToSpace(Operator):
    """``depth_to_space``: each row gives as many as the sizes of the parts that it gets multiply to."""

    moved: Moves
    settings = ("moved",)

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        row = np.arange(self.shape[2 + dim]) // size_of(self.moved[1 + dim])
        return (Reach(self.sources[0], row, row + 1),)

    def compute(self, band: Band) -> None:
        _move_channels(band.xs[0], self.moved, band.out, band.low - band.starts[0] * size_of(self.moved[1]))
