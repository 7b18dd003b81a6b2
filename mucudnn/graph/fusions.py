"""Convolutions of a graph, with what surrounds them folded into their filters or computed as their epilogues."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.utils.fusion import fuse_conv_bn_weights

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.graph.builder import Builder, Node
from mucudnn.graph.convolution import Convolution
from mucudnn.graph.operators import aten
from mucudnn.running.problems import DTYPE_NAMES

NORM = aten._native_batch_norm_legit_no_training.default
ACTIVATIONS = {aten.relu.default: "ReLU", aten.silu.default: "SiLU"}
CONVOLUTIONS = {
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv_transpose2d.input,
    aten.convolution.default,
}


@dataclass
class Fused:
    """A convolution with the nodes after it that are computed with it, of which the last has the result."""

    nodes: list[Node]
    problem: ConvProblem
    weight: Tensor
    bias: Tensor | None
    output_padding: tuple[int, int]
    added: Node | None = None
    activation: str | None = None

    @property
    def last(self) -> Node:
        return self.nodes[-1]


def fused_at(node: Node, constants: Mapping[str, Tensor], taken: set[Node], samples: int) -> Fused | None:
    """Return a convolution of constants with what follows it; None for one that is a barrier."""
    given = arguments_of(node)
    weight, bias = (constants.get(getattr(given.get(name), "name", "")) for name in ("weight", "bias"))
    x, y = getattr(given["input"], "meta", {}).get("val"), node.meta["val"]
    if weight is None or (given.get("bias") is not None and bias is None):
        return None
    if not isinstance(x, Tensor) or x.dim() != 4 or weight.dim() != 4 or x.dtype not in DTYPE_NAMES:
        return None
    is_transposed = bool(given.get("transposed")) or node.target is aten.conv_transpose2d.input
    padding = _paddings(given.get("padding", 0), given.get("dilation", 1), weight)
    if padding is None or x.dtype != weight.dtype or x.shape[0] != samples:
        return None
    image, result = (y, x) if is_transposed else (x, y)
    try:
        problem = ConvProblem(
            Operation.BACKWARD_DATA if is_transposed else Operation.FORWARD,
            *(image.shape[1], image.shape[2], image.shape[3], result.shape[1], weight.shape[2], weight.shape[3]),
            *(two(given.get("stride", 1)), padding, two(given.get("dilation", 1)), given.get("groups", 1)),
            *(DTYPE_NAMES[x.dtype], MemoryFormat.CHANNELS_LAST),
        )
    except InvalidInputError:
        return None
    output_padding = two(given.get("output_padding", 0))
    fused = Fused([node], problem, weight.detach(), None if bias is None else bias.detach(), output_padding)
    _extend(fused, constants, taken, is_transposed=is_transposed)
    return fused


def convolution_of(builder: Builder, parts: Fused) -> Convolution:
    """Return the operator of a fused convolution, once the tensors that it reads are there."""
    x = builder.image(parts.nodes[0].args[0])
    assert x is not None
    sources = [x]
    if parts.added is not None:
        added = builder.image(parts.added)
        assert added is not None
        sources.append(added)
    return Convolution(
        **builder.described(parts.last),
        sources=tuple(sources),
        problem=parts.problem,
        weight=parts.weight.contiguous(memory_format=torch.channels_last),
        bias=parts.bias,
        activation=parts.activation,
        output_padding=parts.output_padding,
    )


def _extend(fused: Fused, constants: Mapping[str, Tensor], taken: set[Node], *, is_transposed: bool) -> None:
    following = _only_reader(fused.last)
    if following is not None and following.target is NORM and fused.last is following.args[0]:
        y = _only_reader(following)
        is_foldable = y is not None and y.target is operator.getitem and y.args[1] == 0
        if is_foldable and _fold_norm(fused, following, constants, is_transposed=is_transposed):
            fused.nodes += [following, y]
            following = _only_reader(y)
    if following is not None and following.target is aten.mul.Tensor and isinstance(following.args[1], (int, float)):
        fused.weight, fused.bias = (
            fused.weight * following.args[1],
            (None if fused.bias is None else fused.bias * following.args[1]),
        )
        fused.nodes.append(following)
        following = _only_reader(following)
    if following is not None and following not in taken and not is_transposed:
        other = _other_of_sum(following, fused.last)
        if other is not None:
            fused.added = other
            fused.nodes.append(following)
            following = _only_reader(following)
    if following is not None and following not in taken:
        activation = ACTIVATIONS.get(following.target)
        if following.target is aten.hardtanh.default and list(following.args[1:]) == [0.0, 6.0]:
            activation = "ReLU6"
        if activation is not None:
            fused.activation = activation
            fused.nodes.append(following)


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_of_sum(node: Node, y: Node) -> Node | None:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    other = second if first is y else first
    if not isinstance(other, fx.Node) or other is y or other.op != "call_function":
        return None
    values = y.meta["val"], other.meta.get("val")
    is_alike = (
        isinstance(values[1], Tensor) and values[0].shape == values[1].shape and values[0].dtype == values[1].dtype
    )
    return other if is_alike else None


def _fold_norm(fused: Fused, norm: Node, constants: Mapping[str, Tensor], *, is_transposed: bool) -> bool:
    """Fold batch norm into the filter and the bias, in float64, rounded once; return whether that was possible."""
    if is_transposed and fused.problem.groups > 1:
        return False
    *tensors, _, eps = norm.args[1:]
    scale, shift, mean, variance = (None if one is None else constants.get(one.name) for one in tensors)
    if mean is None or variance is None:
        return False
    scale, shift, mean, variance, bias = (
        None if one is None else one.double() for one in (scale, shift, mean, variance, fused.bias)
    )
    assert mean is not None
    assert variance is not None
    weight, bias = fuse_conv_bn_weights(fused.weight.double(), bias, mean, variance, eps, scale, shift, is_transposed)
    folded = [one.detach().to(fused.weight.dtype) for one in (weight, bias)]
    if not all(one.isfinite().all() for one in folded):
        return False
    fused.weight, fused.bias = folded
    return True


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a call by name, without those left at their defaults."""
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def two(value: Any) -> tuple[int, int]:
    values = [value] if isinstance(value, int) else list(value) or [0]
    return (values[0], values[-1])


def _paddings(padding: Any, dilation: Any, weight: Tensor) -> tuple[int, int] | None:
    if not isinstance(padding, str):
        return two(padding)
    if padding == "valid":
        return 0, 0
    totals = [d * (size - 1) for d, size in zip(two(dilation), weight.shape[2:], strict=True)]
    return None if any(total % 2 for total in totals) else (totals[0] // 2, totals[1] // 2)
