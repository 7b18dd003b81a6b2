"""Operators that compute any band of rows of their result from some rows of what they read.

A band is a range of samples and of rows. Tensors are (N, C, H, W). Each operator says which rows it reads (``reaches``)
and computes a band exactly as it would compute the whole: padding is added only where the image ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.solver.bands import Indices, Reach

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default}  # of tensors in another memory format, which may need a copy

Shape = tuple[int, ...]
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Ref:
    """A result of an earlier operator, by its index in the graph, as an argument."""

    index: int


@dataclass(slots=True)
class Band:
    """The operands of one call.

    xs: for each of ``sources``, the rows that were asked for, from row ``starts`` on. wholes: complete results, by
    index. out: the rows ``low`` to ``high`` - 1 of the result, to be written. samples: the band's samples.
    """

    xs: Sequence[Tensor]
    starts: Sequence[int]
    wholes: dict[int, Any]
    out: Tensor
    low: int
    high: int
    samples: slice


@dataclass(kw_only=True)
class Operator:
    """Base class.

    shape, dtype, device: of the result, (N, C, H, W). sources: indices of what is read in rows; wholes: as a whole.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    device: torch.device = CPU
    sources: tuple[int, ...] = ()
    wholes: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.shape[2]

    def reaches(self, heights: Sequence[int]) -> tuple[Reach, ...]:
        """Return the rows that are read of each source, which has so many rows: by default the same rows."""
        same = np.arange(self.rows)
        return tuple(Reach(source, same, same + 1) for source in self.sources)

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        """Return the operator with other indices of what it reads."""
        sources, wholes = (tuple(map(numbers.__getitem__, some)) for some in (self.sources, self.wholes))
        return replace(self, sources=sources, wholes=wholes)

    def compute(self, band: Band) -> None:
        """Compute a band."""
        raise NotImplementedError

    @property
    def kind(self) -> object:
        """Return what operators of the same cost have in common, apart from shapes."""
        return type(self).__name__


def windows(rows: int, height: int, stride: int, padding: int, extent: int) -> tuple[Indices, Indices]:
    """Return the first and behind the last input row that each output row reads, of ``height``, through a window.

    A window that lies in the padding reads the nearest row.
    """
    start = np.arange(rows) * stride - padding
    first = np.clip(start, 0, height - 1)
    return first, np.clip(start + extent, first + 1, height)


@dataclass(kw_only=True)
class Barrier(Operator):
    """An operator that needs everything at once, or is not known: it is called as it is.

    aliases: what its result may share memory with.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nbytes: int = 0
    aliases: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return 0

    @property
    def kind(self) -> object:
        return self.name  # each is measured

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        def given(value: Any) -> Any:
            return Ref(numbers[value.index]) if isinstance(value, Ref) else value

        args, kwargs = tree_map(given, (self.args, self.kwargs))
        aliases = tuple(map(numbers.__getitem__, self.aliases))
        return replace(super().renumbered(numbers), args=args, kwargs=kwargs, aliases=aliases)

    def call(self, results: Callable[[int], Any]) -> Any:
        def given(value: Any) -> Any:
            if isinstance(value, Ref):
                return results(value.index)
            if isinstance(value, (list, tuple)):
                return type(value)(map(given, value))
            return value

        args, kwargs = given(self.args), {name: given(value) for name, value in self.kwargs.items()}
        if self.target in VIEWS:
            return aten.reshape.default(*args, **kwargs)
        return self.target(*args, **kwargs)


@dataclass(kw_only=True)
class Input(Operator):
    """A tensor that the caller gives; ``number`` counts the leaves of the arguments."""

    number: int

    @property
    def rows(self) -> int:
        return 0


# Operators that read the rows that they write


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a ``Local`` operator: a result by index, or a constant tensor.

    has_samples, has_rows: whether its first and its last dimension but one are those of the result.
    """

    value: int | Tensor
    has_samples: bool
    has_rows: bool


def _out_of(target: Any) -> Any:
    """Return the overload of an operator that writes into an existing tensor; None if there is none."""
    if target is aten.relu.default:
        return lambda x, out: aten.clamp_min.out(x, 0, out=out)
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments]
    for name in target._overloadpacket.overloads():
        overload = getattr(target._overloadpacket, name)
        *others, last = overload._schema.arguments
        if last.is_out and [(a.name, str(a.type)) for a in others] == wanted:
            return overload
    return None


@dataclass(kw_only=True)
class Local(Operator):
    """An operator whose results depend on the same row of the same sample only, such as an addition or SiLU."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out_target: Any = field(init=False)

    def __post_init__(self) -> None:
        self.out_target = _out_of(self.target) if isinstance(self.target, torch._ops.OpOverload) else None

    @property
    def kind(self) -> object:
        return str(self.target), len(self.sources)

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        def given(value: Any) -> Any:
            is_result = isinstance(value, Operand) and isinstance(value.value, int)
            return replace(value, value=numbers[value.value]) if is_result else value

        args, kwargs = tree_map(given, (self.args, self.kwargs))
        return replace(super().renumbered(numbers), args=args, kwargs=kwargs)

    def compute(self, band: Band) -> None:
        given = dict(zip(self.sources, band.xs, strict=True))

        def taken(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(taken, value))
            if not isinstance(value, Operand):
                return value
            if isinstance(value.value, int) and value.has_rows:
                return given[value.value]
            tensor = band.wholes[value.value] if isinstance(value.value, int) else value.value
            if value.has_rows:
                tensor = tensor.narrow(-2, band.low, band.high - band.low)
            return tensor[band.samples] if value.has_samples else tensor

        args, kwargs = taken(self.args), {name: taken(value) for name, value in self.kwargs.items()}
        strides = band.out.stride()[1:]
        if self.out_target is not None and all(
            x.stride()[1:] == strides for x in band.xs
        ):  # torch's gelu needs equal ones
            self.out_target(*args, **kwargs, out=band.out)
        else:
            band.out.copy_(self.target(*args, **kwargs))


@dataclass(kw_only=True)
class Copy(Operator):
    """A copy, into another memory format, of some channels."""

    channels: slice = field(default_factory=lambda: slice(None))

    def compute(self, band: Band) -> None:
        band.out.copy_(band.xs[0][:, self.channels])


@dataclass(kw_only=True)
class Concatenation(Operator):
    """Several tensors, one behind another along the channels."""

    widths: tuple[int, ...]  # channels of each, in order
    order: tuple[int, ...]  # positions in ``sources``, since a tensor may occur twice

    def compute(self, band: Band) -> None:
        start = 0
        for width, position in zip(self.widths, self.order, strict=True):
            band.out[:, start : start + width].copy_(band.xs[position])
            start += width


@dataclass(kw_only=True)
class Shuffle(Operator):
    """Pixels from channels (``factor`` r > 0: each row gives r rows), or the reverse (``factor`` below 0)."""

    factor: int

    @property
    def kind(self) -> object:
        return "Shuffle", self.factor

    def reaches(self, heights: Sequence[int]) -> tuple[Reach, ...]:
        rows, r = np.arange(self.rows), abs(self.factor)
        first, last = (rows // r, rows // r + 1) if self.factor > 0 else (rows * r, rows * r + r)
        return (Reach(self.sources[0], first, last),)

    def compute(self, band: Band) -> None:
        if self.factor < 0:
            band.out.copy_(F.pixel_unshuffle(band.xs[0], -self.factor))
            return
        skipped = band.low - band.starts[0] * self.factor
        band.out.copy_(F.pixel_shuffle(band.xs[0], self.factor)[:, :, skipped : skipped + band.high - band.low])


# Operators that read windows


@dataclass(kw_only=True)
class AveragePool(Operator):
    """Average pooling. kernel, stride, padding: of rows and of columns. divisor: None for the size of the window.

    A band begins at a row from which the windows of torch's operator are those of the whole; rows beyond it are
    dropped.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool
    counts_padding: bool
    divisor: int | None
    height: int = field(init=False)  # of the image

    @property
    def kind(self) -> object:
        return "AveragePool", self.kernel, self.stride

    def reaches(self, heights: Sequence[int]) -> tuple[Reach, ...]:
        rows, self.height = np.arange(self.rows), heights[0]
        stride, padding = self.stride[0], self.padding[0]
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


@dataclass(kw_only=True)
class MaxPool(Operator):
    """The largest number of each window.

    kernel, stride, padding, dilation: of rows and of columns.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def kind(self) -> object:
        return "MaxPool", self.kernel, self.stride

    def reaches(self, heights: Sequence[int]) -> tuple[Reach, ...]:
        extent = self.dilation[0] * (self.kernel[0] - 1) + 1
        return (Reach(self.sources[0], *windows(self.rows, heights[0], self.stride[0], self.padding[0], extent)),)

    def compute(self, band: Band) -> None:
        x, sides = band.xs[0], []
        starts = self.padding[1], band.starts[0] - band.low * self.stride[0] + self.padding[0]
        for dimension, before in zip((1, 0), starts, strict=True):  # columns, then rows, as F.pad takes them
            extent = self.dilation[dimension] * (self.kernel[dimension] - 1) + 1
            last = (band.out.shape[2 + dimension] - 1) * self.stride[dimension] + extent
            sides += [before, last - before - x.shape[2 + dimension]]
        padded = F.pad(x, sides, value=-torch.inf)
        band.out.copy_(F.max_pool2d(padded, self.kernel, self.stride, 0, self.dilation))


@dataclass(kw_only=True)
class Padding(Operator):
    """Padding of rows and columns by zeros, another value, or the image reflected or replicated.

    sides: left, right, above, below, none negative.
    """

    sides: tuple[int, int, int, int]
    mode: str
    value: float

    @property
    def kind(self) -> object:
        return "Padding", self.mode

    def _source_rows(self, height: int) -> Indices:
        """Return, for each row of the result, the row of the input it comes from, or -1."""
        _, _, above, below = self.sides
        rows = torch.arange(height, dtype=torch.float64).view(1, 1, height, 1)
        if self.mode == "constant":
            padded = F.pad(rows, (0, 0, above, below), value=-1)
        else:
            padded = F.pad(rows, (0, 0, above, below), self.mode)
        return padded.flatten().long().numpy()

    def reaches(self, heights: Sequence[int]) -> tuple[Reach, ...]:
        self.source_rows = rows = self._source_rows(heights[0])
        first = np.where(rows < 0, heights[0], rows)
        last = np.where(rows < 0, 0, rows + 1)
        return (_monotone(self.sources[0], first, last),)

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

    The rows' coordinates are computed in float64, by torch's formulas (area_pixel_compute_source_index).
    """

    mode: str
    align_corners: bool
    scales: tuple[float | None, float | None]

    @property
    def kind(self) -> object:
        return "Resize", self.mode

    def reaches(self, heights: Sequence[int]) -> tuple[Reach, ...]:
        self.above, self.below, self.weights = self._sources(heights[0], self.rows, self.scales[0])
        return (_monotone(self.sources[0], self.above, self.below + 1),)

    def columns(self, width: int) -> tuple[Indices, Indices, NDArray[np.float64]]:
        """Return, for each column of the result, the columns of x on both sides, and the weight of the second."""
        return self._sources(width, self.shape[3], self.scales[1])

    def _sources(self, size: int, outputs: int, scale: float | None) -> tuple[Indices, Indices, NDArray[np.float64]]:
        if self.mode == "nearest":
            numbers = torch.arange(size, dtype=torch.float32).view(1, 1, size, 1)
            near = aten.upsample_nearest2d.default(numbers, [outputs, 1], scale, None).flatten().long().numpy()
            return near, near, np.zeros(outputs)
        at = np.arange(outputs, dtype=np.float64)
        if self.align_corners:
            at = at * ((size - 1) / (outputs - 1) if outputs > 1 else 0.0)
        else:
            at = np.maximum((at + 0.5) * (1 / scale if scale else size / outputs) - 0.5, 0)
        before = np.minimum(at.astype(np.int64), size - 1)
        return before, np.minimum(before + 1, size - 1), np.clip(at - before, 0, 1)

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


def _monotone(source: int, first: Indices, last: Indices) -> Reach:
    """Return a reach whose rows do not decrease from one row of the result to the next, which contains the given."""
    return Reach(source, np.minimum.accumulate(first[::-1])[::-1], np.maximum.accumulate(last))


# Normalization over rows, in two passes


@dataclass(kw_only=True)
class Moments(Operator):
    """The sums and the sums of squares of each group of channels of each sample, for ``Normalization``.

    Sums of each row are in float64 and added in the order of rows, so that they do not depend on the bands. shape: (N,
    C, H, W) of what is read. The result is (N, groups, 2) in float64, whole only after the last band.
    """

    groups: int

    def new_result(self) -> Tensor:
        return torch.zeros(self.shape[0], self.groups, 2, dtype=torch.float64, device=self.device)

    def compute(self, band: Band) -> None:
        n, channels, height, width = band.xs[0].shape
        rows = band.xs[0].view(n, self.groups, channels // self.groups, height, width)
        sums = rows.sum((2, 4), dtype=torch.float64)
        squares = torch.linalg.vector_norm(rows, 2, (2, 4), dtype=torch.float64).square_()
        totals = band.out[band.samples]
        in_order = torch.cat((totals.unsqueeze(2), torch.stack((sums, squares), 3)), 2).cumsum(2)
        totals.copy_(in_order[:, :, -1])


@dataclass(kw_only=True)
class Normalization(Operator):
    """Group norm with the moments of the whole image, as torch computes it, and an activation."""

    eps: float
    weight: Tensor | None
    bias: Tensor | None
    activation: str | None = None

    def compute(self, band: Band) -> None:
        x, (_, channels, height, width) = band.xs[0], self.shape
        totals = band.wholes[self.wholes[0]][band.samples]
        groups = totals.shape[1]
        mean, squares = (totals / (channels // groups * height * width)).unbind(2)
        scale = ((squares - mean.square()).clamp_min_(0) + self.eps).rsqrt_()
        mean, scale = (one.repeat_interleave(channels // groups, 1) for one in (mean, scale))
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        scale, shift = (one.to(x.dtype)[:, :, None, None] for one in (scale, shift))
        torch.addcmul(shift, x, scale, out=band.out)
        Epilogue(self.activation).apply(band.out)


@dataclass(kw_only=True)
class Scale(Operator):
    """Batch norm of constants: x * factor + addend for each channel, (C,) each, and an activation."""

    factor: Tensor
    addend: Tensor
    activation: str | None = None

    def compute(self, band: Band) -> None:
        factor, addend = (one.view(-1, 1, 1) for one in (self.factor, self.addend))
        torch.addcmul(addend, band.xs[0], factor, out=band.out)
        Epilogue(self.activation).apply(band.out)
