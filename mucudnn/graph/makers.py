"""The operators that ATen calls become: in bands of rows where their rows depend on few rows of what they read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from mucudnn.graph.builder import Builder, Node
from mucudnn.graph.fusions import arguments_of, two
from mucudnn.graph.operators import (
    VIEWS,
    Concatenation,
    Copy,
    Local,
    Moments,
    Normalization,
    Operand,
    Operator,
    Ref,
    Scale,
    Shuffle,
    aten,
)
from mucudnn.graph.windows import AveragePool, MaxPool, Padding, Resize

_RANDOM = torch.Tag.nondeterministic_seeded


def local_operator(builder: Builder, node: Node) -> Operator | None:
    """Return an operator of which rows depend on the same rows only; None if it may not be one."""
    tags = getattr(node.target, "tags", ())
    is_pointwise = torch.Tag.pointwise in tags and _RANDOM not in tags
    is_along_channels = node.target in _ALONG_CHANNELS and arguments_of(node).get("dim") in (1, -3)
    if not (is_pointwise or is_along_channels or node.target in _LOCAL):
        return None
    described = builder.described(node)
    sources: list[int] = []
    wholes: list[int] = []

    def given(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(given, value))
        if not isinstance(value, fx.Node):
            return value
        known = builder.values[value]
        if not isinstance(known, (Ref, Tensor)):
            raise _NotLocalError
        of = value.meta["val"] if isinstance(known, Ref) else known
        operand = _operand(known, of, described["shape"])
        if isinstance(known, Ref):
            image = builder.image(value) if operand.has_rows else None
            index = known.index if image is None else image
            operand = replace(operand, value=index)
            (sources if operand.has_rows else wholes).append(index)
        return operand

    try:
        args, kwargs = given(tuple(node.args)), {name: given(value) for name, value in node.kwargs.items()}
    except _NotLocalError:
        return None
    if not sources:
        return None
    sources_, wholes_ = tuple(dict.fromkeys(sources)), tuple(dict.fromkeys(wholes))
    return Local(**described, sources=sources_, wholes=wholes_, target=node.target, args=args, kwargs=kwargs)


class _NotLocalError(Exception):
    pass


def _operand(known: Any, value: Any, shape: Sequence[int]) -> Operand:
    """Return how an operand of a result of this shape is cut. Raises ``_NotLocalError`` if it cannot be."""
    if not isinstance(value, Tensor) or value.dim() > 4:
        raise _NotLocalError
    index = known.index if isinstance(known, Ref) else known
    has_rows = value.dim() >= 2 and value.shape[-2] == shape[2] and (shape[2] > 1 or value.dim() == 4)
    has_samples = value.dim() == 4 and value.shape[0] == shape[0]
    if isinstance(known, Ref) and has_rows and not has_samples:
        raise _NotLocalError  # the same rows for each sample: not an image of the batch
    return Operand(index, has_samples, has_rows)


_ALONG_CHANNELS = {aten.softmax.int, aten.log_softmax.int, aten._softmax.default}
_LOCAL = {aten.hardswish.default, aten.prelu.default, aten.to.dtype, aten._to_copy.default}


def _concatenation(builder: Builder, node: Node) -> Operator | None:
    given = arguments_of(node)
    every = [builder.image(one) for one in given["tensors"]]
    images = [one for one in every if one is not None]
    dtypes = {one.meta["val"].dtype for one in given["tensors"]}
    if given.get("dim", 0) not in (1, -3) or len(images) < len(every) or len(dtypes) > 1:
        return None
    sources = tuple(dict.fromkeys(images))
    widths = tuple(one.meta["val"].shape[1] for one in given["tensors"])
    order = tuple(sources.index(one) for one in images)
    return Concatenation(**builder.described(node), sources=sources, widths=widths, order=order)


def _shuffle(sign: int, builder: Builder, node: Node) -> Operator | None:
    x = builder.image(node.args[0])
    return None if x is None else Shuffle(**builder.described(node), sources=(x,), factor=sign * node.args[1])


def _slice(builder: Builder, node: Node) -> Operator | Ref | None:
    given = arguments_of(node)
    x, dim = builder.image(given["self"]), given.get("dim", 0) % 4
    if x is None or given.get("step", 1) != 1:
        return None
    if given["self"].meta["val"].shape == node.meta["val"].shape:
        return Ref(x)
    if dim != 1:
        return None
    channels = slice(given.get("start") or 0, given.get("end"))
    return Copy(**builder.described(node), sources=(x,), channels=channels)


SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}


def split(builder: Builder, node: Node) -> tuple[Ref, ...] | None:
    x = builder.image(node.args[0])
    if x is None or arguments_of(node).get("dim", 0) not in (1, -3):
        return None
    start, parts = 0, []
    for number, part in enumerate(node.meta["val"]):
        channels = slice(start, start + part.shape[1])
        start = channels.stop
        described = {"name": f"{node.name}_{number}", "shape": tuple(part.shape), "dtype": part.dtype}
        parts.append(builder.add(Copy(**described, device=part.device, sources=(x,), channels=channels)))
    return tuple(parts)


def _pool(builder: Builder, node: Node) -> Operator | None:
    given = arguments_of(node)
    x = builder.image(given["self"])
    kernel = given["kernel_size"]
    stride, padding = given.get("stride") or kernel, given.get("padding", 0)
    if x is None:
        return None
    if node.target is aten.max_pool2d.default:
        described, pairs = builder.described(node), {"dilation": two(given.get("dilation", 1))}
        pairs |= {"kernel": two(kernel), "stride": two(stride), "padding": two(padding)}
        return MaxPool(**described | pairs, sources=(x,))
    return AveragePool(
        **builder.described(node),
        sources=(x,),
        kernel=two(kernel),
        stride=two(stride),
        padding=two(padding),
        ceil_mode=given.get("ceil_mode", False),
        counts_padding=given.get("count_include_pad", True),
        divisor=given.get("divisor_override"),
    )


def _adaptive_pool(builder: Builder, node: Node) -> Operator | Ref | None:
    x, value = builder.image(node.args[0]), node.meta["val"]
    if x is None:
        return None
    sizes = list(zip(node.args[0].meta["val"].shape[2:], value.shape[2:], strict=True))
    if any(size % outputs for size, outputs in sizes):
        return None
    rows, columns = (size // outputs for size, outputs in sizes)
    return Ref(x) if rows == columns == 1 else _average(builder.described(node), x, (rows, columns))


def mean(builder: Builder, node: Node) -> Operator | None:
    """Return the mean over rows and columns, which may leave out these two dimensions; None for another mean."""
    x, given = builder.image(node.args[0]), arguments_of(node)
    if x is None or {one % 4 for one in given.get("dim") or ()} != {2, 3} or given.get("dtype"):
        return None
    of_x = node.args[0].meta["val"]
    return _average(builder.described(node) | {"shape": (*of_x.shape[:2], 1, 1)}, x, tuple(of_x.shape[2:]))


def _average(described: dict[str, Any], x: int, kernel: tuple[int, int]) -> AveragePool:
    return AveragePool(
        **described,
        sources=(x,),
        kernel=kernel,
        stride=kernel,
        padding=(0, 0),
        ceil_mode=False,
        counts_padding=True,
        divisor=None,
    )


def _padding(builder: Builder, node: Node) -> Operator | None:
    given = arguments_of(node)
    x, sides = builder.image(given["self"]), list(given["pad"])
    if x is None or any(sides[4:]):
        return None
    sides = (sides[:4] + [0] * 4)[:4]
    mode, value = given.get("mode", "constant"), given.get("value") or 0.0
    if mode == "circular" or min(sides) < 0:
        return None
    return Padding(**builder.described(node), sources=(x,), sides=tuple(sides), mode=mode, value=float(value))


def _resize(mode: str, builder: Builder, node: Node) -> Operator | None:
    given = arguments_of(node)
    x = builder.image(given["input" if "input" in given else "self"])
    if x is None:
        return None
    scales = given.get("scale_factors") or (given.get("scales_h"), given.get("scales_w"))
    return Resize(
        **builder.described(node),
        sources=(x,),
        mode=mode,
        align_corners=bool(given.get("align_corners")),
        scales=(scales[0], scales[1]),
    )


def _group_norm(builder: Builder, node: Node) -> Operator | None:
    """Return group norm, or instance norm, whose groups are the channels, after its sums over all rows."""
    given, described = arguments_of(node), builder.described(node)
    x = builder.image(given["input"])
    if x is None or not given.get("use_input_stats", True):
        return None
    weight, bias = (
        builder.constant(given[name]) if given.get(name) is not None else None for name in ("weight", "bias")
    )
    of_sums = described | {"name": f"{node.name}, moments", "dtype": torch.float64}
    moments = builder.add(Moments(**of_sums, sources=(x,), groups=given.get("num_groups", described["shape"][1])))
    return Normalization(
        **described, sources=(x,), wholes=(moments.index,), eps=given.get("eps", 1e-5), weight=weight, bias=bias
    )


def batch_norm(builder: Builder, node: Node) -> Operator | None:
    """Return a batch norm that no convolution takes in."""
    x, (y, *_) = builder.image(node.args[0]), node.meta["val"]
    if x is None:
        return None
    weight, bias, mean, variance = (None if one is None else builder.constant(one).double() for one in node.args[1:5])
    factor = (variance + node.args[6]).rsqrt() * (1 if weight is None else weight)
    addend = (0 if bias is None else bias) - mean * factor
    numbers = {"factor": factor.to(y.dtype), "addend": addend.to(y.dtype)}
    described = {"name": node.name, "shape": tuple(y.shape), "dtype": y.dtype, "device": y.device}
    return Scale(**described, sources=(x,), **numbers)


def may_alias(target: Any) -> bool:
    """Return whether an operator's result may share memory with its arguments."""
    if target is operator.getitem or target in VIEWS:
        return True
    schema = getattr(target, "_schema", None)
    return schema is None or any(one.alias_info is not None for one in schema.returns)


MAKERS: dict[Any, Callable[[Builder, Node], Any]] = {
    aten.cat.default: _concatenation,
    aten.pixel_shuffle.default: partial(_shuffle, 1),
    aten.pixel_unshuffle.default: partial(_shuffle, -1),
    aten.slice.Tensor: _slice,
    aten.max_pool2d.default: _pool,
    aten.avg_pool2d.default: _pool,
    aten.adaptive_avg_pool2d.default: _adaptive_pool,
    aten.mean.dim: mean,
    aten.pad.default: _padding,
    aten.constant_pad_nd.default: _padding,
    aten.upsample_nearest2d.vec: partial(_resize, "nearest"),
    aten.upsample_nearest2d.default: partial(_resize, "nearest"),
    aten.upsample_bilinear2d.vec: partial(_resize, "bilinear"),
    aten.upsample_bilinear2d.default: partial(_resize, "bilinear"),
    aten.group_norm.default: _group_norm,
    aten.instance_norm.default: _group_norm,
}
