"""Operators that read other rows than those that they write: pooling, padding, resizing, convolutions."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, Operation, Sizes
from mucudnn.graph.operators import Band, Operator, aten, for_channels
from mucudnn.graph.steps import address_of, are_images, copy_step, elementwise_step, step
from mucudnn.kernels.algorithm import Algorithm, BoundStage, Epilogue, Workspace, fuses
from mucudnn.kernels.compiled.library import FUNCTIONS, ProgramStep
from mucudnn.kernels.torch_convolution import functions
from mucudnn.running.workspace import lasting_buffer
from mucudnn.solver.bands import Cut, Indices, Reach
from mucudnn.solver.placement import aligned

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
    height: of what is read.
    """

    kernel: Sizes
    stride: Sizes
    padding: Sizes
    height: int
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


@dataclass(frozen=True, kw_only=True, eq=False)
class MaxPool(Pool):
    """The largest number of each window.

    dilation: of (frames,) rows and columns.
    """

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

    def reaches(self) -> tuple[Reach, ...]:
        rows = _padded_rows(self.rows, self.sides[-2:], self.mode)
        first = np.where(rows < 0, self.rows - sum(self.sides[-2:]), rows)
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

    def _neighbors(self, dimension: int) -> _Neighbors:
        """Return the neighbors along a dimension: 0 for rows or frames."""
        sizes = self.size[dimension], self.shape[2 + dimension]
        return _neighbors(self.mode, *sizes, self.scales[dimension], aligns_corners=self.align_corners)

    def reaches(self) -> tuple[Reach, ...]:
        above, below, _ = self._neighbors(0)
        return (_monotone(self.sources[0], above, below + 1),)

    def compute(self, band: Band) -> None:
        x, start, rows = band.xs[0], band.starts[0], slice(band.low, band.high)
        size, scales = [x.shape[2], *self.shape[3:]], (None, *self.scales[1:])
        above, below, weights = (along_rows[rows] for along_rows in self._neighbors(0))
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
        above, below, weights = (along_rows[band.low : band.high] for along_rows in self._neighbors(0))
        above, below = above - band.starts[0], below - band.starts[0]
        along_rows, images = (above, below, weights), [(out, x)]
        if len(self.size) > 2:
            along_rows = self._neighbors(1)
            images = [(out[:, :, frame], x[:, :, nearest]) for frame, nearest in enumerate(above)]
        tables = [
            np.ascontiguousarray(table, np.float32 if table.dtype == np.float64 else None)
            for table in (*along_rows, *self._neighbors(len(self.size) - 1))
        ]
        return [step("resize", into, image, numbers=(not is_nearest,), tables=tables) for into, image in images]


# Of each row of a result, the rows on both sides, and the weight of the second
_Neighbors: TypeAlias = tuple[Indices, Indices, NDArray[np.float64]]


@lru_cache(maxsize=64)
def _neighbors(mode: str, size: int, outputs: int, scale: float | None, *, aligns_corners: bool) -> _Neighbors:
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


# Convolutions: by an algorithm of mucudnn that writes the band where it belongs, or by torch


@dataclass(frozen=True, slots=True)
class AlgorithmPair:
    """The algorithms of a convolution for all rows at once, and for bands of them; None for torch's own."""

    whole: Algorithm | None = None
    band: Algorithm | None = None


class _Choices:
    """What is chosen after a graph is made: an operator itself is not written to."""

    pairs: tuple[AlgorithmPair, ...] = (AlgorithmPair(),)
    keeps: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Convolution(_Choices, Operator):
    """activation(convolution(x) + added), where ``added`` is the second of ``sources``, if there are two.

    problem: of the whole image, FORWARD, or BACKWARD_DATA for a transposed convolution, in channels_last; there may be
    fewer rows of the result than of the problem's, if fewer are padded below. weight, bias: with batch norm folded in.
    output_padding: rows and columns that a transposed convolution adds. pairs: of
    algorithms, of each variant of a segment's cut. keeps: whether prepared filters are kept between calls. extent: rows
    from the first to the last that a filter reads.
    """

    problem: ConvProblem
    weight: Tensor
    bias: Tensor | None
    activation: str | None = None
    output_padding: Sizes = (0, 0)
    _kept: dict[str, Tensor] = field(default_factory=dict, repr=False)
    _stages: dict[Any, tuple[BoundStage, Workspace]] = field(default_factory=dict, repr=False)

    @property
    def is_transposed(self) -> bool:
        return self.problem.operation is Operation.BACKWARD_DATA

    @property
    def extent(self) -> int:
        return self.problem.dilation[0] * (self.problem.window[0] - 1) + 1

    @property
    def align(self) -> int:
        return self.problem.stride[0] if self.is_transposed else 1  # with which a transposed filter is prepared

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        copied = replace(super().renumbered(numbers), _kept={}, _stages={})
        copied.pairs, copied.keeps = self.pairs, self.keeps
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what refers to addresses in this process."""
        return self.__dict__ | {"_kept": {}, "_stages": {}}

    def reaches(self) -> tuple[Reach, ...]:
        stride, padding, rows = self.problem.stride[0], self.problem.padding[0], np.arange(self.rows)
        if self.is_transposed:
            height = self.problem.positions[0]
            first = np.clip((rows + padding - self.extent + 1) // stride, 0, height - 1)
            last = np.clip((rows + padding) // stride + 1, first + 1, height)
        else:
            first, last = windows(self.rows, self.problem.extent[0], stride, padding, self.extent)
        same = [Reach(source, rows, rows + 1) for source in self.sources[1:]]
        return (Reach(self.sources[0], first, last), *same)

    def above(self, low: int, start: int) -> int:
        """Return how many rows of padding are above a band from row ``low`` on, which reads from row ``start`` on."""
        stride, padding = self.problem.stride[0], self.problem.padding[0]
        return padding + low - start * stride if self.is_transposed else start - (low * stride - padding)

    def algorithm(self, cut: Cut) -> Algorithm | None:
        """Return what computes the convolution in a segment that is cut in this way; None for torch's own."""
        pair = self.pairs[min(cut.variant, len(self.pairs) - 1)]
        return pair.whole if cut.bands == 1 else pair.band

    def stage(self, algorithm: Algorithm, n: int, x_rows: int, y_rows: int, above: int) -> tuple[BoundStage, Workspace]:
        """Return an algorithm for a band, ready to call, and its workspace. x_rows: read, y_rows: written."""
        key = algorithm.name, n, x_rows, y_rows, above, torch.get_num_threads()
        if key not in self._stages:
            rows = (y_rows, x_rows) if self.is_transposed else (x_rows, y_rows)
            made = algorithm.band(self.problem, n, rows, above)
            assert made is not None  # those that run no bands are not chosen
            self._stages[key] = made
        return self._stages[key]

    def prepared_bytes(self, algorithm: Algorithm | None) -> int:
        """Return the bytes of the prepared filter in the workspace: 0 if it is kept."""
        if algorithm is None or self.keeps:
            return 0
        return algorithm.workspace(self.problem, 1).prepared_bytes

    def forget(self, except_for: Container[str] = ()) -> None:
        """Free the prepared filters that are kept, except for those of the named algorithms."""
        for name in [name for name in self._kept if name not in except_for]:
            del self._kept[name]

    def _bound(self, algorithm: Algorithm, band: Band) -> BoundStage:
        """Return an algorithm of ours for the band, whose tensors are dense."""
        x, above, reserved = band.xs[0], self.above(band.low, band.starts[0]), band.reserved
        stage, needed = self.stage(algorithm, len(x), x.shape[2], band.high - band.low, above)
        if needed.prepared_bytes > reserved.prepared_bytes or needed.scratch_bytes > reserved.scratch_bytes:
            raise InvalidInputError(f"{algorithm.name} needs {needed} for a band of {self.name}; it has {reserved}")
        return stage

    def compute(self, band: Band) -> None:
        x, out, bias = band.xs[0], band.out, self.bias
        epilogue = Epilogue(self.activation, band.xs[1] if len(band.xs) > 1 else None)
        if band.algorithm is None:
            out.copy_(epilogue.apply(self._by_torch(band)))
            return
        stage, buffers = self._bound(band.algorithm, band), (band.prepared, band.scratch)
        if self.is_transposed:
            stage(out.data_ptr(), self.weight.data_ptr(), x.data_ptr(), None, *buffers, None)
            if bias is not None:
                out.add_(for_channels(bias, out))
            epilogue.apply(out)
            return
        does_all = fuses(band.algorithm, self.problem)
        has_epilogue = does_all and (self.activation or epilogue.added is not None)
        addresses = x.data_ptr(), self.weight.data_ptr(), out.data_ptr(), None if bias is None else bias.data_ptr()
        stage(*addresses, *buffers, epilogue if has_epilogue else None)
        if not does_all:
            epilogue.apply(out)

    def _by_torch(self, band: Band) -> Tensor:
        problem, x = self.problem, band.xs[0]
        (_, *columns), height = problem.padding, band.high - band.low
        above = self.above(band.low, band.starts[0])
        if self.is_transposed:
            missing = above + height - ((x.shape[2] - 1) * problem.stride[0] + self.extent)
            transposed = functions.conv_transpose3d if problem.is_volume else functions.conv_transpose2d
            return transposed(
                *(x, self.weight, self.bias, problem.stride, (0, *columns)),
                *((max(missing, 0), *self.output_padding[1:]), problem.groups, problem.dilation),
            )[:, :, above : above + height]
        is_pixel = x.shape[2:] == self.shape[2:] == self.weight.shape[2:] == (1, 1)
        if is_pixel and problem.groups == 1 and not any(problem.padding):
            return F.linear(x.flatten(1), self.weight.flatten(1), self.bias)[:, :, None, None]
        below = (height - 1) * problem.stride[0] + self.extent - above - x.shape[2]
        padding: Sizes = (0, *columns)
        if height == problem.positions[0] or above == below == problem.padding[0]:
            padding = problem.padding
        elif min(above, below) <= -x.shape[2]:  # none of the rows is read
            x = x.new_zeros(*x.shape[:2], above + x.shape[2] + below, *x.shape[3:])
        elif above or below:
            x = F.pad(x, (*(0, 0) * len(columns), above, below))
        convolve = functions.conv3d if problem.is_volume else functions.conv2d
        return convolve(x, self.weight, self.bias, problem.stride, padding, problem.dilation, problem.groups)

    def steps(self, band: Band) -> list[ProgramStep]:
        if band.algorithm is None:
            return []
        x, out, bias = band.xs[0], band.out, self.bias
        added = band.xs[1] if len(band.xs) > 1 else None
        stage = self._bound(band.algorithm, band)
        does_all = fuses(band.algorithm, self.problem) and not self.is_transposed
        if stage.entry is None or not (does_all or are_images(out, added)):
            return []
        addresses = self.weight.data_ptr(), 0 if self.is_transposed else address_of(bias), band.prepared, band.scratch
        reserved = band.reserved.prepared_bytes, band.reserved.scratch_bytes
        made = [step("convolution", out, x, added if does_all else None, numbers=reserved, addresses=addresses)]
        made[0].entry, made[0].stage = stage.entry
        if does_all:
            made[0].operation = FUNCTIONS.index(self.activation)
            return made
        if bias is not None and self.is_transposed:
            made.append(elementwise_step(out, out, combination="add", other=for_channels(bias, out)))
        if added is not None:
            made.append(elementwise_step(out, out, self.activation, combination="add", other=added))
        elif self.activation:
            made.append(elementwise_step(out, out, self.activation))
        return made


Convolution.__setattr__ = object.__setattr__  # type: ignore[method-assign]  # for _Choices


def convolutions_of(operators: Iterable[Operator]) -> dict[int, Convolution]:
    """Return the convolutions among the operators of a graph, by index."""
    return {index: one for index, one in enumerate(operators) if isinstance(one, Convolution)}


def keep_filters(used: Iterable[tuple[Convolution, Algorithm]]) -> None:
    """Prepare the filters that are kept between calls, of convolutions with the algorithms that run them.

    Those that are new are in one buffer: separately, most would be too small for huge pages. Copies of a convolution in
    a graph that recomputes its result share one.
    """
    every = {(id(one._kept), algorithm.name): (one, algorithm) for one, algorithm in used if one.keeps}
    new = [(one, algorithm) for one, algorithm in every.values() if algorithm.name not in one._kept]
    sizes = [algorithm.workspace(one.problem, 1).prepared_bytes for one, algorithm in new]
    buffer, end = lasting_buffer(sum(map(aligned, sizes))), 0
    for (one, algorithm), size in zip(new, sizes, strict=True):
        kept = buffer[end : end + size]
        algorithm.open(one.problem, one.weight, kept)
        one._kept.setdefault(algorithm.name, kept)  # programs refer to the first one's address
        end += aligned(size)
