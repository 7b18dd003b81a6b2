"""The operators that calls of ATen become: in bands of rows where their rows depend on few rows of what they read.

Each function of ``MAKERS`` adds the operators of a node to the graph, and returns what its value is: a ``Ref``, or a
tuple for several results. None: the node is not of the kind that the function makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from mucudnn.graph.nodes import (
    ALONG_CHANNELS,
    CONCATENATIONS,
    NORM,
    PADS,
    Node,
    arguments_of,
    described,
    is_pointwise,
    shape_of,
    sizes,
)
from mucudnn.graph.operators.moves import Concatenation, Copy, DepthToSpace, Shuffle, depth_to_space
from mucudnn.graph.operators.operator import (
    Captured,
    Local,
    Moments,
    Normalization,
    Operator,
    Ref,
    Scale,
    aten,
    function_of,
    norm_of_channels,
    shares_of,
)
from mucudnn.graph.operators.windows import AveragePool, MaxPool, Padding, Resize
from mucudnn.kernels.algorithm import ACTIVATIONS

Made: TypeAlias = "Ref | tuple[Ref | None, ...] | None"

_RESIZE_MODES = {
    **dict.fromkeys((aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default), "nearest"),
    **dict.fromkeys((aten.upsample_nearest3d.vec, aten.upsample_nearest3d.default), "nearest"),
    **dict.fromkeys((aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact2d.default), "nearest-exact"),
    **dict.fromkeys((aten._upsample_nearest_exact3d.vec, aten._upsample_nearest_exact3d.default), "nearest-exact"),
    **dict.fromkeys((aten.upsample_bilinear2d.vec, aten.upsample_bilinear2d.default), "bilinear"),
    **dict.fromkeys((aten.upsample_trilinear3d.vec, aten.upsample_trilinear3d.default), "trilinear"),
}
_MAX_POOLS = {aten.max_pool2d.default, aten.max_pool3d.default}
_LOCAL = {aten.hardswish.default, aten.prelu.default, aten.to.dtype, aten._to_copy.default}


@dataclass
class Builder:
    """A graph, to which operators are added.

    values: what nodes became: a ``Ref``, constant, or tuple.
    copies: of inputs and results of barriers, in channels_last.
    """

    graph: Captured
    values: dict[fx.Node, Any] = field(default_factory=dict)
    copies: dict[fx.Node, Ref] = field(default_factory=dict)

    def add(self, operator: Operator) -> Ref:
        self.graph.operators.append(operator)
        return Ref(len(self.graph.operators) - 1)

    def is_image(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dim() in (4, 5)
            and value.shape[0] == self.graph.samples
            and value.is_floating_point()
            and value.numel() > 0
        )

    def image(self, node: Node) -> int | None:
        """Return the index of a result that may be read in rows or frames, in channels_last; None for anything else."""
        if not isinstance(node, fx.Node) or not self.is_image(node.meta.get("val")):
            return None
        value = self.values.get(node)
        if not isinstance(value, Ref):
            return None
        if self.graph.operators[value.index].rows == 0:
            if node not in self.copies:
                copied = described(node, name=f"{node.name}, channels_last")
                self.copies[node] = self.add(Copy(**copied, sources=(value.index,)))
            value = self.copies[node]
        return value.index

    def images(self, nodes: Iterable[Node]) -> tuple[int, ...] | None:
        """Return what ``image`` does for several; None if it returns None for one of them."""
        indices = [self.image(node) for node in nodes]
        images = tuple(index for index in indices if index is not None)
        return images if len(images) == len(indices) else None

    def constants(self, *nodes: Node) -> list[Any] | None:
        """Return constants and plain arguments; None if one of them is a result."""
        constants = [self.values[node] if isinstance(node, fx.Node) else node for node in nodes]
        return None if any(isinstance(constant, (Ref, tuple)) for constant in constants) else constants


Maker: TypeAlias = Callable[[Builder, Node], Made]


def of_image(make: Callable[[Builder, Node, int], Made]) -> Maker:
    """Return the maker that makes nothing unless the first operand is an image, whose index it passes on."""

    def make_of_image(builder: Builder, node: Node) -> Made:
        x = builder.image(node.args[0])
        return None if x is None else make(builder, node, x)

    return make_of_image


def local_operator(builder: Builder, node: Node) -> Made:
    """Add an operator of which rows depend on the same rows only."""
    if not isinstance(node.meta["val"], Tensor):
        return None
    is_along_channels = node.target in ALONG_CHANNELS and _is_of_channels(node)
    if not (is_pointwise(node.target) or is_along_channels or node.target in _LOCAL):
        return None
    # Which operands have the rows of the result
    in_rows = list[fx.Node]()
    values = {operand: builder.values[operand] for operand in node.all_input_nodes}
    for operand, value in values.items():
        tensor = operand.meta["val"] if isinstance(value, Ref) else value
        if not isinstance(tensor, Tensor):
            return None
        has_samples, has_rows = shares_of(tensor.shape, shape_of(node))
        if isinstance(value, Ref) and has_rows:
            if not has_samples:
                return None  # the same rows for each sample: not an image of the batch
            in_rows.append(operand)
    if not in_rows:
        return None
    for operand in in_rows:
        image = builder.image(operand)
        values[operand] = values[operand] if image is None else Ref(image)
    sources = [values[operand].index for operand in in_rows]
    wholes = [value.index for operand, value in values.items() if operand not in in_rows and isinstance(value, Ref)]
    args, kwargs = fx.node.map_arg((tuple(node.args), dict(node.kwargs)), values.__getitem__)
    return builder.add(
        Local(
            **described(node),
            sources=tuple(dict.fromkeys(sources)),
            wholes=tuple(dict.fromkeys(wholes)),
            target=node.target,
            args=args,
            kwargs=dict(kwargs),
        )
    )


def _is_of_channels(node: Node) -> bool:
    """Return whether a function along some dimensions is along the channels, and keeps this dimension."""
    dims, count = arguments_of(node).get("dim"), len(shape_of(node.args[0]))
    is_along_channels = (dims if isinstance(dims, (list, tuple)) else [dims]) in ([1], [1 - count])
    return is_along_channels and len(shape_of(node)) == count


def _activation(builder: Builder, node: Node) -> Made:
    """Let the normalization before compute an activation, if nothing else reads its result."""
    normalization, name = _extensible(builder, node.args[0]), function_of(node.target, node.args, node.kwargs)
    if normalization is None or name not in ACTIVATIONS:
        return None
    return _extended(builder, node.args[0], replace(normalization, activation=name))


def _extensible(builder: Builder, node: Node) -> Normalization | Scale | None:
    """Return the normalization of which a node is the result, if it has one reader and no activation yet."""
    ref = builder.values.get(node) if isinstance(node, fx.Node) else None
    if not isinstance(ref, Ref):
        return None
    aliases = [alias for alias, value in builder.values.items() if isinstance(value, Ref) and value == ref]
    operator = builder.graph.operators[ref.index]
    if not isinstance(operator, (Normalization, Scale)) or operator.activation:
        return None
    return None if any(len(alias.users) > 1 for alias in aliases) else operator


def _extended(builder: Builder, node: Node, normalization: Normalization | Scale) -> Ref:
    """Put a normalization that computes more in place of the one of which a node is the result."""
    ref = cast(Ref, builder.values[node])
    builder.graph.operators[ref.index] = normalization
    return ref


def _multiple(builder: Builder, node: Node) -> Made:
    """Let the normalization before multiply by constants, or add them."""
    for x, operand in (node.args, node.args[::-1]):
        scale, constants = _extensible(builder, x), builder.constants(operand)
        if not isinstance(scale, Scale) or constants is None or node.kwargs:
            continue
        (value,), (_, channels, *extent) = constants, scale.shape
        if isinstance(value, Tensor):
            shape = (channels, *(1 for _ in extent))
            is_for_channels = value.numel() == channels and value.shape[-len(shape) :] == shape
            if not is_for_channels or value.dtype != scale.dtype:
                continue
            value = value.flatten()
        if node.target is aten.mul.Tensor:
            scale = replace(scale, factor=scale.factor * value, addend=scale.addend * value)
        else:
            scale = replace(scale, addend=scale.addend + value)
        return _extended(builder, x, scale)
    return None


@of_image
def _pixel_norm(builder: Builder, node: Node, x: int) -> Made:
    """Add the division of pixels by their norms."""
    y, eps = node.meta["val"], node.args[3]
    ones = torch.ones(y.shape[1], dtype=y.dtype, device=y.device)
    addend = torch.zeros_like(ones)
    return builder.add(Scale(**described(node), sources=(x,), factor=ones, addend=addend, least_norm=eps))


@of_image
def _norm_of_channels(builder: Builder, node: Node, x: int) -> Made:
    """Add the layer norm of pixels over their channels."""
    y, eps = node.meta["val"], node.args[3]
    constants = builder.constants(*node.args[1:3])
    if constants is None:
        return None
    factor = torch.ones(y.shape[1], dtype=y.dtype, device=y.device) if constants[0] is None else constants[0]
    addend = torch.zeros_like(factor) if constants[1] is None else constants[1]
    return builder.add(Scale(**described(node), sources=(x,), factor=factor, addend=addend, eps=eps))


def _concatenation(builder: Builder, node: Node) -> Made:
    arguments = arguments_of(node)
    images = builder.images(arguments["tensors"])
    values = [tensor.meta["val"] for tensor in arguments["tensors"]]
    dim = arguments.get("dim", 0) % node.meta["val"].dim()
    if dim == 0 or images is None or len({value.dtype for value in values}) > 1:
        return None
    lengths = tuple(value.shape[dim] for value in values)
    return builder.add(Concatenation(**described(node), sources=images, dim=dim, sizes=lengths))


@of_image
def _repetition(builder: Builder, node: Node, x: int) -> Made:
    """Add copies of a tensor, one behind another; one of rows, columns or channels may stand for all."""
    before, after = shape_of(node.args[0]), shape_of(node)
    if len(before) != len(after):
        return None
    changed = [dim for dim, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    if not changed:
        return Ref(x)
    if len(changed) == 1 and changed != [0] and (node.target is aten.repeat.default or changed == [2]):
        (dim,) = changed
        count = after[dim] // before[dim]
        lengths = (before[dim],) * count
        return builder.add(Concatenation(**described(node), sources=(x,) * count, dim=dim, sizes=lengths))
    if node.target is aten.repeat.default or not {*changed}.isdisjoint((0, 2)):
        return None
    if all(_repeats(user, node) for user in node.users):
        return Ref(x)
    return builder.add(Copy(**described(node), sources=(x,)))


def _repeats(reader: Node, expanded: Node) -> bool:
    """Return whether an operator broadcasts to the size to which one of its operands is expanded."""
    operands = (operand for operand in reader.all_input_nodes if operand.target is not expanded.target)
    return is_pointwise(reader.target) and any(shape_of(operand) == shape_of(expanded) for operand in operands)


def _shuffle(builder: Builder, node: Node) -> Made:
    x = builder.image(node.args[0]) if node.meta["val"].dim() == 4 else None
    factor = node.args[1] if node.target is aten.pixel_shuffle.default else -node.args[1]
    return None if x is None else builder.add(Shuffle(**described(node), sources=(x,), factor=factor))


@of_image
def _depth_to_space(builder: Builder, node: Node, x: int) -> Made:
    return builder.add(DepthToSpace(**described(node), sources=(x,), moved=node.args[1]))


@of_image
def _slice(builder: Builder, node: Node, x: int) -> Made:
    arguments, before, after = arguments_of(node), shape_of(node.args[0]), shape_of(node)
    dim = arguments.get("dim", 0) % len(after)
    if before == after:
        return Ref(x)
    if dim == 0:
        return None
    start, _, step = slice(arguments.get("start"), arguments.get("end"), arguments.get("step", 1)).indices(before[dim])
    return builder.add(Copy(**described(node), sources=(x,), parts=_part(after, dim, start, step)))


def _part(shape: Sequence[int], dim: int, start: int, step: int = 1) -> tuple[slice, ...]:
    """Return the parts of a ``Copy`` of this shape: some indices along a dimension, and all along the others."""
    parts = [slice(0, None, 1)] * len(shape)
    parts[dim] = slice(start, start + (shape[dim] - 1) * step + 1, step)
    return tuple(parts)


@of_image
def _split(builder: Builder, node: Node, x: int) -> Made:
    dim = arguments_of(node).get("dim", 0) % len(shape_of(node.args[0]))
    if dim == 0 or any(part.numel() == 0 for part in node.meta["val"]):
        return None
    start, copies = 0, []
    for number, value in enumerate(node.meta["val"]):
        copied = described(node, value, name=f"{node.name}_{number}", sources=(x,))
        copies.append(builder.add(Copy(**copied, parts=_part(value.shape, dim, start))))
        start += value.shape[dim]
    return tuple(copies)


@of_image
def _pool(builder: Builder, node: Node, x: int) -> Made:
    arguments, dims = arguments_of(node), node.meta["val"].dim() - 2
    kernel, padding = sizes(arguments["kernel_size"], dims), sizes(arguments.get("padding", 0), dims)
    window = described(node, sources=(x,), kernel=kernel, padding=padding, size=shape_of(node.args[0])[2:])
    window["stride"] = sizes(arguments.get("stride") or kernel, dims)
    if node.target in _MAX_POOLS:
        return builder.add(MaxPool(**window, dilation=sizes(arguments.get("dilation", 1), dims)))
    return builder.add(
        AveragePool(
            **window,
            ceil_mode=arguments.get("ceil_mode", False),
            counts_padding=arguments.get("count_include_pad", True),
            divisor=arguments.get("divisor_override"),
        )
    )


@of_image
def _adaptive_pool(builder: Builder, node: Node, x: int) -> Made:
    before, after = shape_of(node.args[0])[2:], shape_of(node)[2:]
    if any(whole % part for whole, part in zip(before, after, strict=True)):
        return None
    kernel = tuple(whole // part for whole, part in zip(before, after, strict=True))
    if {*kernel} == {1}:
        return Ref(x)
    window = described(node, kernel=kernel, stride=kernel, padding=(0,) * len(kernel), size=before)
    return builder.add(AveragePool(**window, sources=(x,)))


def _mean(builder: Builder, node: Node) -> Made:
    """Add the mean over rows and columns, which become one pixel."""
    arguments, dims = arguments_of(node), node.meta["val"].dim()
    is_over_image = {dim % dims for dim in arguments.get("dim") or ()} == {*range(2, dims)}
    return _adaptive_pool(builder, node) if is_over_image and not arguments.get("dtype") else None


@of_image
def _padding(builder: Builder, node: Node, x: int) -> Made:
    arguments, y = arguments_of(node), node.meta["val"]
    sides, count = list(arguments["pad"]), 2 * (y.dim() - 2)
    if any(sides[count:]):
        return None
    sides = (sides + [0] * count)[:count]
    mode, value = arguments.get("mode", "constant"), arguments.get("value") or 0.0
    if mode == "circular" or min(sides) < 0:
        return None
    constant = torch.tensor(float(value), dtype=y.dtype, device=y.device)
    return builder.add(Padding(**described(node), sources=(x,), sides=tuple(sides), mode=mode, constant=constant))


@of_image
def _resize(builder: Builder, node: Node, x: int) -> Made:
    arguments, size = arguments_of(node), shape_of(node.args[0])[2:]
    scales = arguments.get("scale_factors") or [arguments.get(f"scales_{name}") for name in "dhw"[-len(size) :]]
    return builder.add(
        Resize(
            **described(node),
            sources=(x,),
            mode=_RESIZE_MODES[node.target],
            align_corners=bool(arguments.get("align_corners")),
            scales=tuple(scales),
            size=size,
        )
    )


def _group_norm(builder: Builder, node: Node) -> Made:
    """Add group norm, or instance norm, whose groups are the channels, after its sums over all rows."""
    arguments = arguments_of(node)
    constants = builder.constants(arguments.get("weight"), arguments.get("bias"))
    if constants is None or not arguments.get("use_input_stats", True):
        return None
    x = builder.image(arguments["input"])
    if x is None:
        return None
    summed = described(node, name=f"{node.name}, moments", dtype=torch.float64)
    groups = arguments.get("num_groups", shape_of(node)[1])
    moments = builder.add(Moments(**summed, sources=(x,), groups=groups))
    normalized = described(node, sources=(x,), wholes=(moments.index,), eps=arguments.get("eps", 1e-5))
    return builder.add(Normalization(**normalized, weight=constants[0], bias=constants[1]))


def _batch_norm(builder: Builder, node: Node) -> Made:
    """Add a batch norm of constants that no convolution takes in."""
    constants, y = builder.constants(*node.args[1:5]), node.meta["val"][0]
    x = None if constants is None else builder.image(node.args[0])
    if x is None or constants is None:
        return None
    weight, bias, mean, variance = (None if constant is None else constant.double() for constant in constants)
    factor = (variance + node.args[6]).rsqrt() * (1 if weight is None else weight)
    addend = (0 if bias is None else bias) - mean * factor
    normed = described(node, y, sources=(x,), factor=factor.to(y.dtype), addend=addend.to(y.dtype))
    return builder.add(Scale(**normed)), None, None


MAKERS: Mapping[Any, Maker] = {
    NORM: _batch_norm,
    F.normalize: _pixel_norm,
    norm_of_channels: _norm_of_channels,
    **dict.fromkeys((aten.relu.default, aten.relu6.default, aten.silu.default, aten.hardtanh.default), _activation),
    **dict.fromkeys((aten.mul.Tensor, aten.add.Tensor), _multiple),
    **dict.fromkeys(CONCATENATIONS, _concatenation),
    **dict.fromkeys((aten.repeat.default, aten.expand.default), _repetition),
    **dict.fromkeys((aten.pixel_shuffle.default, aten.pixel_unshuffle.default), _shuffle),
    depth_to_space: _depth_to_space,
    aten.slice.Tensor: _slice,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default), _split),
    **dict.fromkeys((*_MAX_POOLS, aten.avg_pool2d.default, aten.avg_pool3d.default), _pool),
    **dict.fromkeys((aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default), _adaptive_pool),
    aten.mean.dim: _mean,
    **dict.fromkeys(PADS, _padding),
    **dict.fromkeys(_RESIZE_MODES, _resize),
    **dict.fromkeys((aten.group_norm.default, aten.instance_norm.default), _group_norm),
}
