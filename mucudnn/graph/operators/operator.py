"""Operators of graphs: each computes any band of rows of its result from some rows of what it reads.

A band is a range of samples and of rows. Tensors are (N, C, H, W), or volumes (N, C, D, H, W), of which the frames take
the place of rows. Each operator says which rows it reads (``reaches``), computes a band by torch (``compute``) exactly
as it would compute the whole (padding is added only where the image ends), and may have steps in C++ that compute it
without torch (``steps``): operators in float32 and half precision do, copies in every dtype.
"""

from __future__ import annotations

import copyreg
import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from mucudnn.graph.operators import steps
from mucudnn.graph.operators.steps import address_of, are_images, elementwise_step, step
from mucudnn.kernels.algorithm import Algorithm, Epilogue, Workspace
from mucudnn.kernels.compiled.library import FUNCTIONS, ProgramStep
from mucudnn.solver.bands import Reach

if TYPE_CHECKING:
    from mucudnn.graph.guards import ResultMemory

aten = torch.ops.aten
VIEWS = {aten.view.default, aten._unsafe_view.default}  # of tensors in another memory format, which may need a copy

Shape = tuple[int, ...]
CPU = torch.device("cpu")


def _operator_named(packet: str, overload: str) -> Any:
    namespace, name = packet.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


# Torch's operators, which are part of a graph, cannot be pickled otherwise.
copyreg.pickle(
    torch._ops.OpOverload,
    lambda overload: (_operator_named, (overload._schema.name, overload._schema.overload_name or "default")),
)


@dataclass(frozen=True, slots=True)
class Ref:
    """A result of an earlier operator, by its index in the graph, as an argument."""

    index: int


@dataclass(slots=True)
class Band:
    """The operands of one call.

    xs: for each of ``sources``, the rows that were asked for.
    starts: the first of these rows, for each of ``sources``.
    wholes: complete results, by index.
    out: the rows ``low`` to ``high`` - 1 of the result, to be written.
    samples: the band's samples.
    algorithm: what computes a convolution; None for torch's own.
    prepared: the address of its prepared buffer.
    scratch: the address of its scratch buffer.
    reserved: the bytes of these two.
    """

    xs: Sequence[Tensor]
    starts: Sequence[int]
    wholes: Mapping[int, Any]
    out: Tensor
    low: int
    high: int
    samples: slice
    algorithm: Algorithm | None = None
    prepared: int = 0
    scratch: int = 0
    reserved: Workspace = field(default_factory=Workspace)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """Base class. Operators are values, which nothing changes once they are made; each is equal to itself only.

    shape: of the result, as its dtype and its device; (N, C, H, W) or (N, C, D, H, W).
    sources: indices of what is read in rows.
    wholes: indices of what is read as a whole.
    aliases: indices of what the result may share memory with.
    settings: the attributes that operators of the same cost have in common.
    """

    name: str
    shape: Shape
    dtype: torch.dtype
    device: torch.device = CPU
    sources: tuple[int, ...] = ()
    wholes: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()
    settings: ClassVar[tuple[str, ...]] = ()

    @property
    def rows(self) -> int:
        return self.shape[2]

    @property
    def align(self) -> int:
        """A multiple at which bands begin."""
        return 1

    def row_bytes(self) -> int:
        """Return the bytes of a row of one sample; 0 if there are no rows in memory."""
        return self.shape[1] * prod(self.shape[3:]) * self.dtype.itemsize if self.rows else 0

    def whole_bytes(self) -> int:
        """Return the bytes of the result; 0 for an argument."""
        return self.shape[0] * self.rows * self.row_bytes() if self.rows else 0

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        """Return the rows that are read of each source: by default the same rows.

        dim: 0 for rows, or frames of volumes; 1 for columns in their place.
        """
        same = np.arange(self.shape[2 + dim])
        return tuple(Reach(source, same, same + 1) for source in self.sources)

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        """Return a copy of the operator that reads what has other indices.

        numbers: the new indices, by the old.
        """
        sources, wholes, aliases = (
            tuple(map(numbers.__getitem__, indices)) for indices in (self.sources, self.wholes, self.aliases)
        )
        return replace(self, sources=sources, wholes=wholes, aliases=aliases)

    def compute(self, band: Band) -> None:
        """Compute a band by torch."""
        raise NotImplementedError

    def steps(self, band: Band) -> list[ProgramStep]:
        """Return the steps in C++ that compute a band; none if torch must."""
        return []


def perform(operator: Operator, band: Band) -> None:
    """Compute a band by steps in C++ if there are any, otherwise by torch."""
    in_cpp = operator.steps(band) if operator.device.type == "cpu" and steps.is_available() else []
    if in_cpp:
        steps.run_array(steps.array_of(in_cpp), (ctypes.c_void_p * 1)())
    else:
        operator.compute(band)


@dataclass
class Captured:
    """A model as a graph, for a batch of ``samples`` on a device.

    template: the output, with numbers of leaves.
    results: of each leaf of the output, a ``Ref`` or a constant.
    direct_results: the results that operators write as the caller gets them, by index, with their strides; two strides
        for pixels, (N, C, 1, 1), that the caller gets as (N, C).
    memories: of the results, by their numbers, for arguments of these strides.
    strides: of the arguments that are tensors.
    kept: what the model's first call makes and later ones read: the owner, its key and the value.
    """

    samples: int
    device: torch.device = CPU
    template: Any = 0
    operators: list[Operator] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    direct_results: dict[int, tuple[int, ...]] = field(default_factory=dict)
    memories: dict[int, ResultMemory] = field(default_factory=dict)
    strides: tuple[tuple[int, ...], ...] = ()
    kept: Sequence[tuple[Any, str, Any]] = ()

    def in_order(self, order: Sequence[int]) -> Captured:
        """Return the graph that runs its operators in this order, which may have some of them more than once.

        Each reads what ran last of those that it may read.
        """
        numbers: dict[int, int] = {}
        operators = []
        for number, index in enumerate(order):
            operators.append(self.operators[index].renumbered(numbers))
            numbers[index] = number
        return replace(
            self,
            operators=operators,
            results=[Ref(numbers[leaf.index]) if isinstance(leaf, Ref) else leaf for leaf in self.results],
            direct_results={numbers[index]: strides for index, strides in self.direct_results.items()},
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Input(Operator):
    """A tensor that the caller gives; ``number`` counts the leaves of the arguments."""

    number: int

    @property
    def rows(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Called(Operator):
    """An operator of torch with its arguments, in which a ``Ref`` stands for a result."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_each(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with each of them changed, also those in lists."""
        args, kwargs = tree_map(change, (self.args, self.kwargs))
        return args, kwargs

    def renumbered(self, numbers: Mapping[int, int]) -> Self:
        args, kwargs = self.with_each(lambda value: Ref(numbers[value.index]) if isinstance(value, Ref) else value)
        return replace(super().renumbered(numbers), args=args, kwargs=kwargs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Barrier(Called):
    """An operator that needs everything at once, or is not known: it is called as it is.

    nbytes: of a new result.
    """

    nbytes: int = 0
    settings = ("name",)  # each is measured

    @property
    def rows(self) -> int:
        return 0

    def whole_bytes(self) -> int:
        return self.nbytes

    def call(self, results: Mapping[int, Any]) -> Any:
        if self.target in VIEWS:
            viewed, shape = self.args
            return (results[viewed.index] if isinstance(viewed, Ref) else viewed).reshape(shape)
        args, kwargs = self.with_each(lambda value: results[value.index] if isinstance(value, Ref) else value)
        return self.target(*args, **kwargs)


# Operators that read the rows that they write

_FUNCTIONS = {
    aten.relu.default: "ReLU",
    aten.relu6.default: "ReLU6",
    aten.silu.default: "SiLU",
    aten.sigmoid.default: "sigmoid",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.hardswish.default: "hardswish",
    aten.leaky_relu.default: "leaky_relu",
}
_COMBINATIONS = {aten.add.Tensor: "add", aten.mul.Tensor: "multiply"}


def function_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the function of one tensor that a call of torch is, as C++ and epilogues know it; None for another."""
    if target is aten.gelu.default:
        return "gelu" if kwargs.get("approximate", "none") == "none" else "gelu_tanh"
    if target is aten.hardtanh.default and list(args[1:]) == [0.0, 6.0]:
        return "ReLU6"
    return _FUNCTIONS.get(target)


@cache
def _out_of(target: Any) -> Any:
    """Return the overload of an operator that writes into an existing tensor; None if there is none."""
    if target is aten.relu.default:
        return lambda x, out: aten.clamp_min.out(x, 0, out=out)
    if not isinstance(target, torch._ops.OpOverload):
        return None
    signature = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    packet: Any = target._overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        *arguments, last = overload._schema.arguments
        if last.is_out and [(argument.name, str(argument.type)) for argument in arguments] == signature:
            return overload
    return None


def shares_of(shape: Sequence[int], result: Shape) -> tuple[bool, bool]:
    """Return whether an operand has the samples, and the rows, of a result to which it is broadcast."""
    is_whole, behind = len(shape) == len(result), len(result) - 2
    has_rows = len(shape) >= behind and shape[-behind] == result[2] and (result[2] > 1 or is_whole)
    return is_whole and shape[0] == result[0], has_rows


def for_channels(values: Tensor, x: Tensor) -> Tensor:
    """Return (C,), or (N, C), as a view that is broadcast to x."""
    return values.view(-1, values.shape[-1], *(1,) * (x.dim() - 2))


def _with_strides_of(out: Tensor, x: Tensor) -> Tensor:
    """Return x as a view with the strides of another tensor, apart from the samples', if it has its elements so."""
    dims = range(1, out.dim())
    if x.shape[1:] != out.shape[1:] or any(x.shape[i] > 1 and x.stride(i) != out.stride(i) for i in dims):
        return x
    return x.as_strided(x.shape, (x.stride(0), *out.stride()[1:]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Local(Called):
    """An operator whose results depend on the same row of the same sample only, such as an addition or SiLU."""

    settings = ("target",)

    def _cut(self, value: Any, band: Band) -> Any:
        """Return what a band needs of an argument."""
        if isinstance(value, Ref):
            if value.index in self.sources:
                return band.xs[self.sources.index(value.index)]
            value = band.wholes[value.index]
        if not isinstance(value, Tensor):
            return value
        has_samples, has_rows = shares_of(value.shape, self.shape)
        if has_rows:
            value = value.narrow(2 - len(self.shape), band.low, band.high - band.low)
        return value[band.samples] if has_samples else value

    def compute(self, band: Band) -> None:
        band = replace(band, xs=[_with_strides_of(band.out, x) for x in band.xs])
        args, kwargs = self.with_each(lambda value: self._cut(value, band))
        into, strides = _out_of(self.target), band.out.stride()[1:]
        if into is not None and all(x.stride()[1:] == strides for x in band.xs):  # torch's gelu needs equal ones
            into(*args, **kwargs, out=band.out)
        else:
            band.out.copy_(self.target(*args, **kwargs))

    def steps(self, band: Band) -> list[ProgramStep]:
        out = band.out
        if not are_images(out, *band.xs):
            return []
        function = function_of(self.target, self.args, self.kwargs) if band.xs[0].shape == out.shape else None
        if function == "leaky_relu":
            slope = self.args[1] if len(self.args) > 1 else 0.01
            return [elementwise_step(out, band.xs[0], function, (slope, 0.0))]
        if function is not None:
            return [elementwise_step(out, band.xs[0], function)]
        if self.target not in _COMBINATIONS or self.kwargs or len(self.args) != 2:
            return []
        combination = _COMBINATIONS[self.target]
        first, second = (self._cut(value, band) for value in self.args)
        if not isinstance(first, Tensor) or first.shape != out.shape:
            first, second = second, first
        if not isinstance(first, Tensor) or first.shape != out.shape:
            return []
        if isinstance(second, (int, float)):
            values = (1.0, float(second)) if combination == "add" else (float(second), 0.0)
            return [elementwise_step(out, first, None, values)]
        if not isinstance(second, Tensor) or not are_images(first, second):
            return []
        is_for_channels = second.dim() == out.dim() and second.shape[1] == out.shape[1] and {*second.shape[2:]} == {1}
        if second.shape == out.shape or is_for_channels:
            return [elementwise_step(out, first, combination=combination, other=second)]
        return []


# Normalization over rows, in two passes


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments(Operator):
    """The sums and the sums of squares of each group of channels of each sample, for ``Normalization``.

    Sums of each row are in float64 and added in the order of rows, so that they do not depend on the bands. The result
    is (N, groups, 2) in float64, whole only after the last band.

    shape: of what is read.
    """

    groups: int

    def row_bytes(self) -> int:
        return 0

    def whole_bytes(self) -> int:
        return self.shape[0] * self.groups * 16

    def new_result(self) -> Tensor:
        return torch.zeros(self.shape[0], self.groups, 2, dtype=torch.float64, device=self.device)

    def compute(self, band: Band) -> None:
        n, channels, height = band.xs[0].shape[:3]
        rows = band.xs[0].view(n, self.groups, channels // self.groups, height, -1)
        sums = rows.sum((2, 4), dtype=torch.float64)
        squares = torch.linalg.vector_norm(rows, 2, (2, 4), dtype=torch.float64).square_()
        totals = band.out[band.samples]
        in_order = torch.cat((totals.unsqueeze(2), torch.stack((sums, squares), 3)), 2).cumsum(2)
        totals.copy_(in_order[:, :, -1])

    def steps(self, band: Band) -> list[ProgramStep]:
        if not are_images(band.xs[0]):
            return []
        moments = step("moments", band.xs[0], band.xs[0], numbers=(self.groups,))
        moments.out.place.offset = band.out[band.samples].data_ptr()
        return [moments]


@dataclass(frozen=True, kw_only=True, eq=False)
class Normalization(Operator):
    """Group norm with the moments of the whole image, as torch computes it, and an activation."""

    eps: float
    weight: Tensor | None
    bias: Tensor | None
    activation: str | None = None

    def compute(self, band: Band) -> None:
        x, channels = band.xs[0], self.shape[1]
        totals = band.wholes[self.wholes[0]][band.samples]
        groups = totals.shape[1]
        mean, squares = (totals / (channels // groups * prod(self.shape[2:]))).unbind(2)
        scale = ((squares - mean.square()).clamp_min_(0) + self.eps).rsqrt_()
        mean, scale = (values.repeat_interleave(channels // groups, 1) for values in (mean, scale))
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        scale, shift = (for_channels(values.to(x.dtype), x) for values in (scale, shift))
        torch.addcmul(shift, x, scale, out=band.out)
        Epilogue(self.activation).apply(band.out)

    def steps(self, band: Band) -> list[ProgramStep]:
        affine = self.weight, self.bias
        has_dtype = all(values is None or values.dtype == self.dtype for values in affine)
        if not has_dtype or not are_images(band.out, *band.xs):
            return []
        totals = band.wholes[self.wholes[0]][band.samples]
        groups = totals.shape[1]
        numbers = FUNCTIONS.index(self.activation), groups, prod(self.shape[1:]) // groups
        addresses = list(map(address_of, (totals, *affine)))
        return [step("normalize", band.out, band.xs[0], numbers=numbers, values=(self.eps, 0.0), addresses=addresses)]


def norm_of_channels(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm of each pixel of images over its channels."""
    return F.layer_norm(x.movedim(1, -1), (x.shape[1],), weight, bias, eps).movedim(-1, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scale(Operator):
    """x * factor + addend for each channel, (C,) each, and an activation: batch norm of constants, norms of pixels.

    least_norm: each pixel is divided by its L2 norm over the channels first, or by this, if it is larger; None if not.
    eps: each pixel is standardized over its channels first, with this added to the variance; None if not.
    """

    factor: Tensor
    addend: Tensor
    least_norm: float | None = None
    eps: float | None = None
    activation: str | None = None

    def compute(self, band: Band) -> None:
        factor, addend = (for_channels(values, band.xs[0]) for values in (self.factor, self.addend))
        x = band.xs[0] if self.least_norm is None else F.normalize(band.xs[0], 2.0, 1, self.least_norm)
        x = x if self.eps is None else norm_of_channels(x, None, None, self.eps)
        torch.addcmul(addend, x, factor, out=band.out)
        Epilogue(self.activation).apply(band.out)

    def steps(self, band: Band) -> list[ProgramStep]:
        if not are_images(band.out, *band.xs):
            return []
        addresses = address_of(self.factor), address_of(self.addend)
        least_norm, eps = (-1.0 if value is None else value for value in (self.least_norm, self.eps))
        numbers = (FUNCTIONS.index(self.activation),)
        return [step("scale", band.out, band.xs[0], numbers=numbers, values=(least_norm, eps), addresses=addresses)]
