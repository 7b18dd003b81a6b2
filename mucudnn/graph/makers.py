"""The operators that calls of ATen become: in bands of rows where their rows depend on few rows of what they read.

Each function of ``MAKERS`` adds the operators of a node to the graph, and returns what its value is: a ``Ref``, or a
tuple for several results. None: the node is not of the kind that the function makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from mucudnn.core.problem import Sizes
from mucudnn.graph.frame_by_frame import FrameByFrame, frame_by_frame
from mucudnn.graph.moves import Concatenation, Copy, DepthToSpace, OneFrame, Shuffle, depth_to_space
from mucudnn.graph.operators import (
    VIEWS,
    Captured,
    Local,
    Moments,
    Normalization,
    Operator,
    Ref,
    Scale,
    aten,
    function_of,
    shares_of,
)
from mucudnn.graph.windows import AveragePool, MaxPool, Padding, Resize
from mucudnn.kernels.algorithm import ACTIVATIONS

Node: TypeAlias = Any  # a torch.fx.Node, or what else is an argument of one
Made: TypeAlias = "Ref | tuple[Ref | None, ...] | None"

NORM = aten._native_batch_norm_legit_no_training.default
ALONG_CHANNELS = {
    *(aten.softmax.int, aten.log_softmax.int, aten._softmax.default),
    *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.linalg_vector_norm.default),
}
CONCATENATIONS = {aten.cat.default, aten.concatenate.default}
IDENTITIES = {
    *(aten.alias.default, aten.detach.default, aten.clone.default, aten.contiguous.default, aten.dropout.default),
}
PADS = {aten.pad.default, aten.constant_pad_nd.default}
_NEAREST_EXACT = {
    *(aten._upsample_nearest_exact2d.vec, aten._upsample_nearest_exact2d.default),
    *(aten._upsample_nearest_exact3d.vec, aten._upsample_nearest_exact3d.default),
}
_MAX_POOLS = {aten.max_pool2d.default, aten.max_pool3d.default}
_LOCAL = {aten.hardswish.default, aten.prelu.default, aten.to.dtype, aten._to_copy.default}


@dataclass
class Builder:
    """A graph, to which operators are added.

    values: what nodes became, a ``Ref``, constant, or tuple. images: copies of inputs and results of barriers, in
    channels_last.
    """

    made: Captured
    values: dict[fx.Node, Any] = field(default_factory=dict)
    images: dict[fx.Node, Ref] = field(default_factory=dict)

    def add(self, one: Operator) -> Ref:
        self.made.operators.append(one)
        return Ref(len(self.made.operators) - 1)

    def is_image(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.dim() in (4, 5)
            and value.shape[0] == self.made.samples
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
        if self.made.operators[value.index].rows == 0:
            if node not in self.images:
                copied = described(node, name=f"{node.name}, channels_last")
                self.images[node] = self.add(Copy(**copied, sources=(value.index,)))
            value = self.images[node]
        return value.index

    def constants(self, *nodes: Node) -> list[Any] | None:
        """Return constants and plain arguments; None if one of them is a result."""
        found = [self.values[one] if isinstance(one, fx.Node) else one for one in nodes]
        return None if any(isinstance(one, (Ref, tuple)) for one in found) else found


def described(node: Node, **changes: Any) -> dict[str, Any]:
    """Return the fields that all operators have, for the result of a node."""
    value = node.meta["val"]
    return {"name": node.name, "shape": tuple(value.shape), "dtype": value.dtype, "device": value.device} | changes


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by name, without those left at their defaults."""
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def sizes(value: Any, count: int) -> Sizes:
    """Return one number for each spatial dimension, from one for all of them or as many."""
    values = [value] if isinstance(value, int) else list(value) or [0]
    return tuple(values) if len(values) == count else (values[0],) * count


def is_pointwise(target: Any) -> bool:
    """Return whether each element of a result of ATen depends on one of each operand, and on no random number."""
    tags = getattr(target, "tags", ())
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


def local_operator(builder: Builder, node: Node) -> Made:
    """Add an operator of which rows depend on the same rows only."""
    if not isinstance(node.meta["val"], Tensor):
        return None
    is_along_channels = node.target in ALONG_CHANNELS and _is_of_channels(node)
    if not (is_pointwise(node.target) or is_along_channels or node.target in _LOCAL):
        return None
    of_result, in_rows = described(node), list[fx.Node]()
    for one in node.all_input_nodes:
        known = builder.values[one]
        value = one.meta["val"] if isinstance(known, Ref) else known
        if not isinstance(value, Tensor):
            return None
        has_samples, has_rows = shares_of(value.shape, of_result["shape"])
        if isinstance(known, Ref) and has_rows:
            if not has_samples:
                return None  # the same rows for each sample: not an image of the batch
            in_rows.append(one)
    if not in_rows:
        return None
    values = {one: builder.values[one] for one in node.all_input_nodes}
    for one in in_rows:
        image = builder.image(one)
        values[one] = values[one] if image is None else Ref(image)
    sources = tuple(dict.fromkeys(values[one].index for one in in_rows))
    others = [known for one, known in values.items() if one not in in_rows]
    wholes = tuple(dict.fromkeys(known.index for known in others if isinstance(known, Ref)))
    args, kwargs = fx.node.map_arg((tuple(node.args), dict(node.kwargs)), values.__getitem__)
    called = Local(**of_result, sources=sources, wholes=wholes, target=node.target, args=args, kwargs=dict(kwargs))
    return builder.add(called)


def _is_of_channels(node: Node) -> bool:
    """Return whether a function along some dimensions is along the channels, and keeps this dimension."""
    given, count = arguments_of(node), node.args[0].meta["val"].dim()
    dims = given.get("dim")
    is_one = (dims if isinstance(dims, (list, tuple)) else [dims]) in ([1], [1 - count])
    return is_one and node.meta["val"].dim() == count


def _activation(builder: Builder, node: Node) -> Made:
    """Let the normalization before compute an activation, if nothing else reads its result."""
    normalization, name = _extensible(builder, node.args[0]), function_of(node.target, node.args)
    if normalization is None or name not in ACTIVATIONS:
        return None
    normalization.activation = name
    return cast(Ref, builder.values[node.args[0]])


def _extensible(builder: Builder, node: Node) -> Normalization | Scale | None:
    """Return the normalization of which a node is the result, if it has one reader and no activation yet."""
    value = builder.values.get(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Ref):
        return None
    alike = [one for one, known in builder.values.items() if isinstance(known, Ref) and known == value]
    made = builder.made.operators[value.index]
    if any(len(one.users) > 1 for one in alike) or not isinstance(made, (Normalization, Scale)) or made.activation:
        return None
    return made


def _multiple(builder: Builder, node: Node) -> Made:
    """Let the normalization before multiply by constants, or add them."""
    for x, other in (node.args, node.args[::-1]):
        made, constants = _extensible(builder, x), builder.constants(other)
        if not isinstance(made, Scale) or constants is None or node.kwargs:
            continue
        (value,), (_, channels, *extent) = constants, made.shape
        if isinstance(value, Tensor):
            of_channels = (channels, *(1 for _ in extent))
            is_for_channels = value.numel() == channels and value.shape[-len(of_channels) :] == of_channels
            if not is_for_channels or value.dtype != made.dtype:
                continue
            value = value.flatten()
        if node.target is aten.mul.Tensor:
            made.factor, made.addend = made.factor * value, made.addend * value
        else:
            made.addend = made.addend + value
        return cast(Ref, builder.values[x])
    return None


def _pixel_norm(builder: Builder, node: Node) -> Made:
    """Add the division of pixels by their norms."""
    x, (_, _, _, eps) = builder.image(node.args[0]), node.args
    if x is None:
        return None
    made, channels = described(node, sources=(x,)), node.meta["val"].shape[1]
    ones = torch.ones(channels, dtype=made["dtype"], device=made["device"])
    return builder.add(Scale(**made, factor=ones, addend=torch.zeros_like(ones), least_norm=eps))


def _concatenation(builder: Builder, node: Node) -> Made:
    given = arguments_of(node)
    every = [builder.image(one) for one in given["tensors"]]
    images = [one for one in every if one is not None]
    values = [one.meta["val"] for one in given["tensors"]]
    dim = given.get("dim", 0) % node.meta["val"].dim()
    if dim == 0 or len(images) < len(every) or len({one.dtype for one in values}) > 1:
        return None
    lengths = tuple(one.shape[dim] for one in values)
    return builder.add(Concatenation(**described(node), sources=tuple(images), dim=dim, sizes=lengths))


def _repetition(builder: Builder, node: Node) -> Made:
    """Add copies of a tensor, one behind another; one of rows, columns or channels may stand for all."""
    x, before, after = builder.image(node.args[0]), shape_of(node.args[0]), shape_of(node)
    if x is None or len(before) != len(after):
        return None
    changed = [dim for dim, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
    if not changed:
        return Ref(x)
    if len(changed) == 1 and changed != [0] and (node.target is aten.repeat.default or changed == [2]):
        (dim,) = changed
        count = after[dim] // before[dim]
        return builder.add(
            Concatenation(**described(node), sources=(x,) * count, dim=dim, sizes=(before[dim],) * count)
        )
    if node.target is aten.repeat.default or not {*changed}.isdisjoint((0, 2)):
        return None
    if all(_repeats(user, node) for user in node.users):
        return Ref(x)
    return builder.add(Copy(**described(node), sources=(x,)))


def _repeats(reader: Node, expanded: Node) -> bool:
    """Return whether an operator broadcasts to the size to which one of its operands is expanded."""
    others = (one for one in reader.all_input_nodes if one.target is not expanded.target)
    return is_pointwise(reader.target) and any(shape_of(one) == shape_of(expanded) for one in others)


def _one_frame(builder: Builder, node: Node) -> Made:
    """Add a view between images and clips of one frame, if what it reads is in rows, and its result is."""
    value, before, after = builder.values[node.args[0]], shape_of(node.args[0]), shape_of(node)
    image, clip = sorted((before, after), key=len)
    dim = next((dim for dim in (2, 3) if clip == (*image[:dim], 1, *image[dim:])), None)
    if dim is None or any(user.op == "output" for user in node.users):
        return None
    if not isinstance(value, Ref) or builder.made.operators[value.index].rows == 0:
        return None
    return builder.add(OneFrame(**described(node), sources=(value.index,), height=before[2], dim=dim))


def shape_of(node: Node) -> tuple[int, ...]:
    """Return the shape of a node's tensor; () for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _shuffle(sign: int, builder: Builder, node: Node) -> Made:
    x = builder.image(node.args[0]) if node.meta["val"].dim() == 4 else None
    return None if x is None else builder.add(Shuffle(**described(node), sources=(x,), factor=sign * node.args[1]))


def _depth_to_space(builder: Builder, node: Node) -> Made:
    x, moved = builder.image(node.args[0]), node.args[1]
    return None if x is None else builder.add(DepthToSpace(**described(node), sources=(x,), moved=moved))


def _frame_by_frame(builder: Builder, node: Node) -> Made:
    function, *clips = node.args
    every = [builder.image(one) for one in clips]
    read = tuple(one for one in every if one is not None)
    if len(read) < len(clips) or node.meta["val"].dim() == 4:
        return None
    return builder.add(FrameByFrame(**described(node), sources=read, function=function))


def _slice(builder: Builder, node: Node) -> Made:
    given = arguments_of(node)
    x, shape = builder.image(given["self"]), node.meta["val"].shape
    if x is None:
        return None
    of_x, dim = given["self"].meta["val"].shape, given.get("dim", 0) % len(shape)
    if of_x == shape:
        return Ref(x)
    if dim == 0:
        return None
    start, _, step = slice(given.get("start"), given.get("end"), given.get("step", 1)).indices(of_x[dim])
    return builder.add(Copy(**described(node), sources=(x,), parts=_part(dim, len(shape), start, step, shape[dim])))


def _part(dim: int, dims: int, start: int, step: int, count: int) -> tuple[slice, ...]:
    """Return the parts of a ``Copy`` of some indices along a dimension, and all along the others."""
    parts = [slice(0, None, 1)] * dims
    parts[dim] = slice(start, start + (count - 1) * step + 1, step)
    return tuple(parts)


def _split(builder: Builder, node: Node) -> Made:
    x = builder.image(node.args[0])
    if x is None:
        return None
    dims = node.args[0].meta["val"].dim()
    dim = arguments_of(node).get("dim", 0) % dims
    if dim == 0 or any(part.numel() == 0 for part in node.meta["val"]):
        return None
    start, parts = 0, []
    for number, part in enumerate(node.meta["val"]):
        copied = {"name": f"{node.name}_{number}", "shape": tuple(part.shape), "dtype": part.dtype}
        of_part = _part(dim, dims, start, 1, part.shape[dim])
        parts.append(builder.add(Copy(**copied, device=part.device, sources=(x,), parts=of_part)))
        start += part.shape[dim]
    return tuple(parts)


def _pool(builder: Builder, node: Node) -> Made:
    given = arguments_of(node)
    x, dims = builder.image(given["self"]), node.meta["val"].dim() - 2
    if x is None:
        return None
    kernel, padding = sizes(given["kernel_size"], dims), sizes(given.get("padding", 0), dims)
    window = described(node, sources=(x,), kernel=kernel, height=given["self"].meta["val"].shape[2])
    window |= {"stride": sizes(given.get("stride") or kernel, dims), "padding": padding}
    if node.target in _MAX_POOLS:
        return builder.add(MaxPool(**window, dilation=sizes(given.get("dilation", 1), dims)))
    return builder.add(
        AveragePool(
            **window,
            ceil_mode=given.get("ceil_mode", False),
            counts_padding=given.get("count_include_pad", True),
            divisor=given.get("divisor_override"),
        )
    )


def _adaptive_pool(builder: Builder, node: Node) -> Made:
    x, size = builder.image(node.args[0]), node.meta["val"].shape[2:]
    if x is None:
        return None
    of_x = node.args[0].meta["val"].shape[2:]
    if any(whole % part for whole, part in zip(of_x, size, strict=True)):
        return None
    kernel = tuple(whole // part for whole, part in zip(of_x, size, strict=True))
    if {*kernel} == {1}:
        return Ref(x)
    window = {"kernel": kernel, "stride": kernel, "padding": (0,) * len(kernel), "height": of_x[0]}
    return builder.add(AveragePool(**described(node), **window, sources=(x,)))


def _mean(builder: Builder, node: Node) -> Made:
    """Add the mean over rows and columns, which become one pixel."""
    given, dims = arguments_of(node), node.meta["val"].dim()
    is_of_image = {one % dims for one in given.get("dim") or ()} == {*range(2, dims)} and not given.get("dtype")
    return _adaptive_pool(builder, node) if is_of_image else None


def _padding(builder: Builder, node: Node) -> Made:
    given = arguments_of(node)
    x, sides = builder.image(given["self"]), list(given["pad"])
    most = 2 * (node.meta["val"].dim() - 2)
    if x is None or any(sides[most:]):
        return None
    sides = (sides + [0] * most)[:most]
    mode, value = given.get("mode", "constant"), given.get("value") or 0.0
    if mode == "circular" or min(sides) < 0:
        return None
    return builder.add(Padding(**described(node), sources=(x,), sides=tuple(sides), mode=mode, value=float(value)))


def _resize(mode: str, builder: Builder, node: Node) -> Made:
    given = arguments_of(node)
    image = given["input" if "input" in given else "self"]
    x = builder.image(image)
    if x is None:
        return None
    size = tuple(image.meta["val"].shape[2:])
    scales = given.get("scale_factors") or [given.get(f"scales_{name}") for name in "dhw"[-len(size) :]]
    return builder.add(
        Resize(
            **described(node),
            sources=(x,),
            mode=mode,
            align_corners=bool(given.get("align_corners")),
            scales=tuple(scales),
            size=size,
        )
    )


def _group_norm(builder: Builder, node: Node) -> Made:
    """Add group norm, or instance norm, whose groups are the channels, after its sums over all rows."""
    given = arguments_of(node)
    constants = builder.constants(given.get("weight"), given.get("bias"))
    if constants is None or not given.get("use_input_stats", True):
        return None
    x = builder.image(given["input"])
    if x is None:
        return None
    of_sums = described(node, name=f"{node.name}, moments", dtype=torch.float64)
    groups = given.get("num_groups", of_sums["shape"][1])
    moments = builder.add(Moments(**of_sums, sources=(x,), groups=groups))
    of_result = described(node, sources=(x,), wholes=(moments.index,), eps=given.get("eps", 1e-5))
    return builder.add(Normalization(**of_result, weight=constants[0], bias=constants[1]))


def _batch_norm(builder: Builder, node: Node) -> Made:
    """Add a batch norm of constants that no convolution takes in."""
    constants, y = builder.constants(*node.args[1:5]), node.meta["val"][0]
    x = None if constants is None else builder.image(node.args[0])
    if x is None or constants is None:
        return None
    weight, bias, mean, variance = (None if one is None else one.double() for one in constants)
    factor = (variance + node.args[6]).rsqrt() * (1 if weight is None else weight)
    addend = (0 if bias is None else bias) - mean * factor
    numbers = {"factor": factor.to(y.dtype), "addend": addend.to(y.dtype)}
    made = {"name": node.name, "shape": tuple(y.shape), "dtype": y.dtype, "device": y.device}
    return builder.add(Scale(**made, sources=(x,), **numbers)), None, None


MAKERS: dict[Any, Callable[[Builder, Node], Made]] = {
    NORM: _batch_norm,
    aten.relu.default: _activation,
    aten.relu6.default: _activation,
    aten.silu.default: _activation,
    aten.mul.Tensor: _multiple,
    aten.add.Tensor: _multiple,
    F.normalize: _pixel_norm,
    aten.hardtanh.default: _activation,
    **dict.fromkeys((aten.cat.default, aten.concatenate.default), _concatenation),
    **dict.fromkeys((aten.repeat.default, aten.expand.default), _repetition),
    aten.pixel_shuffle.default: partial(_shuffle, 1),
    aten.pixel_unshuffle.default: partial(_shuffle, -1),
    depth_to_space: _depth_to_space,
    frame_by_frame: _frame_by_frame,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    **dict.fromkeys((*_MAX_POOLS, aten.avg_pool2d.default, aten.avg_pool3d.default), _pool),
    **dict.fromkeys((aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default), _adaptive_pool),
    aten.mean.dim: _mean,
    **dict.fromkeys(PADS, _padding),
    **dict.fromkeys(VIEWS, _one_frame),
    **dict.fromkeys((aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default), partial(_resize, "nearest")),
    **dict.fromkeys((aten.upsample_nearest3d.vec, aten.upsample_nearest3d.default), partial(_resize, "nearest")),
    **dict.fromkeys(_NEAREST_EXACT, partial(_resize, "nearest-exact")),
    **dict.fromkeys((aten.upsample_bilinear2d.vec, aten.upsample_bilinear2d.default), partial(_resize, "bilinear")),
    **dict.fromkeys((aten.upsample_trilinear3d.vec, aten.upsample_trilinear3d.default), partial(_resize, "trilinear")),
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _group_norm,
}
