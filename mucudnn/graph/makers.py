"""The operators that calls of ATen become: in bands of rows where their rows depend on few rows of what they read.

Each function of ``MAKERS`` adds the operators of a node to the graph, and returns what its value is: a ``Ref``, or a
tuple for several results. None: the node is not of the kind that the function makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from mucudnn.graph.operators import (
    Captured,
    Concatenation,
    Copy,
    Local,
    Moments,
    Normalization,
    Operator,
    Ref,
    Scale,
    Shuffle,
    aten,
    function_of,
    shares_of,
)
from mucudnn.graph.windows import AveragePool, MaxPool, Padding, Resize
from mucudnn.kernels.algorithm import ACTIVATIONS

Node: TypeAlias = Any  # a torch.fx.Node, or what else is an argument of one
Made: TypeAlias = "Ref | tuple[Ref | None, ...] | None"

NORM = aten._native_batch_norm_legit_no_training.default
_ALONG_CHANNELS = {aten.softmax.int, aten.log_softmax.int, aten._softmax.default}
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
            and value.dim() == 4
            and value.shape[0] == self.made.samples
            and value.is_floating_point()
            and value.numel() > 0
        )

    def image(self, node: Node) -> int | None:
        """Return the index of a result that may be read in rows, in channels_last; None for anything else."""
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


def two(value: Any) -> tuple[int, int]:
    values = [value] if isinstance(value, int) else list(value) or [0]
    return (values[0], values[-1])


def local_operator(builder: Builder, node: Node) -> Made:
    """Add an operator of which rows depend on the same rows only."""
    tags = getattr(node.target, "tags", ())
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    is_along_channels = node.target in _ALONG_CHANNELS and arguments_of(node).get("dim") in (1, -3)
    if not (is_pointwise or is_along_channels or node.target in _LOCAL) or not isinstance(node.meta["val"], Tensor):
        return None
    of_result, in_rows = described(node), list[fx.Node]()
    for one in node.all_input_nodes:
        known = builder.values[one]
        value = one.meta["val"] if isinstance(known, Ref) else known
        if not isinstance(value, Tensor) or value.dim() > 4:
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


def _activation(builder: Builder, node: Node) -> Made:
    """Let the normalization before compute an activation, if nothing else reads its result."""
    value, name = builder.values.get(node.args[0]), function_of(node.target, node.args)
    if not isinstance(value, Ref) or len(node.args[0].users) > 1 or name not in ACTIVATIONS:
        return None
    alike = [one for one, known in builder.values.items() if isinstance(known, Ref) and known == value]
    normalization = builder.made.operators[value.index]
    if len(alike) > 1 or not isinstance(normalization, (Normalization, Scale)) or normalization.activation:
        return None
    normalization.activation = name
    return value


def _concatenation(builder: Builder, node: Node) -> Made:
    given = arguments_of(node)
    every = [builder.image(one) for one in given["tensors"]]
    images = [one for one in every if one is not None]
    dtypes = {one.meta["val"].dtype for one in given["tensors"]}
    if given.get("dim", 0) not in (1, -3) or len(images) < len(every) or len(dtypes) > 1:
        return None
    sources = tuple(dict.fromkeys(images))
    widths = tuple(one.meta["val"].shape[1] for one in given["tensors"])
    order = tuple(sources.index(one) for one in images)
    return builder.add(Concatenation(**described(node), sources=sources, widths=widths, order=order))


def _shuffle(sign: int, builder: Builder, node: Node) -> Made:
    x = builder.image(node.args[0])
    return None if x is None else builder.add(Shuffle(**described(node), sources=(x,), factor=sign * node.args[1]))


def _slice(builder: Builder, node: Node) -> Made:
    given = arguments_of(node)
    x, dim = builder.image(given["self"]), given.get("dim", 0) % 4
    if x is None or given.get("step", 1) != 1:
        return None
    if given["self"].meta["val"].shape == node.meta["val"].shape:
        return Ref(x)
    if dim != 1:
        return None
    channels = slice(given.get("start") or 0, given.get("end"))
    return builder.add(Copy(**described(node), sources=(x,), channels=channels))


def _split(builder: Builder, node: Node) -> Made:
    x = builder.image(node.args[0])
    if x is None or arguments_of(node).get("dim", 0) not in (1, -3):
        return None
    start, parts = 0, []
    for number, part in enumerate(node.meta["val"]):
        channels = slice(start, start + part.shape[1])
        start = channels.stop
        copied = {"name": f"{node.name}_{number}", "shape": tuple(part.shape), "dtype": part.dtype}
        parts.append(builder.add(Copy(**copied, device=part.device, sources=(x,), channels=channels)))
    return tuple(parts)


def _pool(builder: Builder, node: Node) -> Made:
    given = arguments_of(node)
    x, kernel = builder.image(given["self"]), two(given["kernel_size"])
    if x is None:
        return None
    window = described(node, sources=(x,), kernel=kernel, height=given["self"].meta["val"].shape[2])
    window |= {"stride": two(given.get("stride") or kernel), "padding": two(given.get("padding", 0))}
    if node.target is aten.max_pool2d.default:
        return builder.add(MaxPool(**window, dilation=two(given.get("dilation", 1))))
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
    if of_x[0] % size[0] or of_x[1] % size[1]:
        return None
    kernel = of_x[0] // size[0], of_x[1] // size[1]
    if kernel == (1, 1):
        return Ref(x)
    window = {"kernel": kernel, "stride": kernel, "padding": (0, 0), "height": of_x[0]}
    return builder.add(AveragePool(**described(node), **window, sources=(x,)))


def _mean(builder: Builder, node: Node) -> Made:
    """Add the mean over rows and columns, which become one pixel."""
    given = arguments_of(node)
    is_of_image = {one % 4 for one in given.get("dim") or ()} == {2, 3} and not given.get("dtype")
    return _adaptive_pool(builder, node) if is_of_image else None


def _padding(builder: Builder, node: Node) -> Made:
    given = arguments_of(node)
    x, sides = builder.image(given["self"]), list(given["pad"])
    if x is None or any(sides[4:]):
        return None
    sides = (sides[:4] + [0] * 4)[:4]
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
    scales = given.get("scale_factors") or (given.get("scales_h"), given.get("scales_w"))
    return builder.add(
        Resize(
            **described(node),
            sources=(x,),
            mode=mode,
            align_corners=bool(given.get("align_corners")),
            scales=(scales[0], scales[1]),
            size=tuple(image.meta["val"].shape[2:]),
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
    aten.hardtanh.default: _activation,
    aten.cat.default: _concatenation,
    aten.pixel_shuffle.default: partial(_shuffle, 1),
    aten.pixel_unshuffle.default: partial(_shuffle, -1),
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.chunk.default: _split,
    aten.max_pool2d.default: _pool,
    aten.avg_pool2d.default: _pool,
    aten.adaptive_avg_pool2d.default: _adaptive_pool,
    aten.mean.dim: _mean,
    aten.pad.default: _padding,
    aten.constant_pad_nd.default: _padding,
    aten.upsample_nearest2d.vec: partial(_resize, "nearest"),
    aten.upsample_nearest2d.default: partial(_resize, "nearest"),
    aten.upsample_bilinear2d.vec: partial(_resize, "bilinear"),
    aten.upsample_bilinear2d.default: partial(_resize, "bilinear"),
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _group_norm,
}
