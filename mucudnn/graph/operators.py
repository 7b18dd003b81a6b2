"""Operators that compute any band of rows of their result from some rows of what they read.

A band is a range of samples and of rows. Tensors are (N, C, H, W). Each operator says which rows it reads (``reaches``)
and computes a band exactly as it would compute the whole: padding is added only where the image ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from mucudnn.kernels.algorithm import Epilogue
from mucudnn.solver.bands import Reach

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
        """Return a copy of the operator that reads what has other indices. numbers: the new ones, by the old."""
        made = copy(self)
        made.sources, made.wholes = (tuple(map(numbers.__getitem__, some)) for some in (self.sources, self.wholes))
        return made

    def compute(self, band: Band) -> None:
        """Compute a band."""
        raise NotImplementedError

    @property
    def kind(self) -> object:
        """Return what operators of the same cost have in common, apart from shapes."""
        return type(self).__name__


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a ``Local`` operator: a result by index, or a constant tensor.

    has_samples, has_rows: whether its first and its last dimension but one are those of the result.
    """

    value: int | Tensor
    has_samples: bool
    has_rows: bool


@dataclass(kw_only=True)
class Called(Operator):
    """An operator of torch with its arguments, in which a ``Ref`` or an ``Operand`` stands for a tensor."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_each(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with each of them changed, also those in lists."""
        args, kwargs = tree_map(change, (self.args, self.kwargs))
        return args, kwargs

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        def changed(value: Any) -> Any:
            if isinstance(value, Ref):
                return Ref(numbers[value.index])
            is_result = isinstance(value, Operand) and isinstance(value.value, int)
            return replace(value, value=numbers[value.value]) if is_result else value

        made = super().renumbered(numbers)
        made.args, made.kwargs = self.with_each(changed)
        return made


@dataclass(kw_only=True)
class Barrier(Called):
    """An operator that needs everything at once, or is not known: it is called as it is.

    aliases: what its result may share memory with.
    """

    nbytes: int = 0
    aliases: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return 0

    @property
    def kind(self) -> object:
        return self.name  # each is measured

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        made = super().renumbered(numbers)
        made.aliases = tuple(map(numbers.__getitem__, self.aliases))
        return made

    def call(self, results: Callable[[int], Any]) -> Any:
        args, kwargs = self.with_each(lambda value: results(value.index) if isinstance(value, Ref) else value)
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
class Local(Called):
    """An operator whose results depend on the same row of the same sample only, such as an addition or SiLU."""

    out_target: Any = field(init=False)

    def __post_init__(self) -> None:
        self.out_target = _out_of(self.target) if isinstance(self.target, torch._ops.OpOverload) else None

    @property
    def kind(self) -> object:
        return str(self.target), len(self.sources)

    def compute(self, band: Band) -> None:
        given = dict(zip(self.sources, band.xs, strict=True))

        def taken(value: Any) -> Any:
            if not isinstance(value, Operand):
                return value
            if isinstance(value.value, int) and value.has_rows:
                return given[value.value]
            tensor = band.wholes[value.value] if isinstance(value.value, int) else value.value
            if value.has_rows:
                tensor = tensor.narrow(-2, band.low, band.high - band.low)
            return tensor[band.samples] if value.has_samples else tensor

        args, kwargs = self.with_each(taken)
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
