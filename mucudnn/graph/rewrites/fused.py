"""Convolutions with what surrounds them, folded into their filters or computed as their epilogues."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.nn.utils.fusion import fuse_conv_bn_weights

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, Sizes
from mucudnn.graph.nodes import NORM, PADS, Node, arguments_of, shape_of, sizes
from mucudnn.graph.operators.operator import aten, function_of
from mucudnn.kernels.algorithm import ACTIVATIONS
from mucudnn.running.problems import problem_of_call

_TRANSPOSED = {aten.conv_transpose2d.input, aten.conv_transpose3d.input}
_CONVOLUTIONS = {
    *(aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default, aten.conv3d.padding),
    *(aten.convolution.default, *_TRANSPOSED),
}


@dataclass
class Fused:
    """A convolution of x with the nodes that are computed with it, in order, of which the last has the result."""

    nodes: list[Node]
    x: Node
    problem: ConvProblem
    weight: Tensor
    bias: Tensor | None
    output_padding: Sizes
    added: Node | None = None
    activation: str | None = None


def fused_convolutions(graph: fx.Graph, constants: Mapping[str, Tensor], samples: int) -> dict[Node, Fused]:
    """Return what is computed with each convolution of constants, by the node that has the result.

    The later of two convolutions that are added takes the addition.

    constants: by name of the node.
    """
    by_result: dict[Node, Fused] = {}
    taken: set[Node] = set()
    for node in reversed(graph.nodes):
        fused = None
        if node.op == "call_function" and node.target in _CONVOLUTIONS:
            fused = _convolution_at(node, constants, samples)
        if fused is not None:
            _extend(fused, constants, taken)
            taken.update(fused.nodes)
            by_result[fused.nodes[-1]] = fused
    return by_result


def _convolution_at(node: Node, constants: Mapping[str, Tensor], samples: int) -> Fused | None:
    """Return a convolution by itself, or with the padding before it; None for one that is a barrier."""
    # Constants on images
    arguments = arguments_of(node)
    weight, bias = (constants.get(getattr(arguments.get(name), "name", "")) for name in ("weight", "bias"))
    x, read = getattr(arguments["input"], "meta", {}).get("val"), arguments["input"]
    if weight is None or (arguments.get("bias") is not None and bias is None):
        return None
    if not isinstance(x, Tensor) or x.dim() not in (4, 5) or weight.dim() != x.dim():
        return None
    if x.dtype != weight.dtype or x.shape[0] != samples:
        return None
    # The same padding on both sides, unless the padding before is causal
    dims, nodes = x.dim() - 2, [node]
    is_transposed = bool(arguments.get("transposed")) or node.target in _TRANSPOSED
    dilation = sizes(arguments.get("dilation", 1), dims)
    padding = _numeric_padding(arguments.get("padding", 0), weight.shape[2:], dilation)
    if padding is None:
        return None
    joined = None if is_transposed else _with_padding_before(node, padding)
    if joined is not None:
        nodes, read, padding = [read, node], read.args[0], joined
    stride, output_padding = (
        sizes(arguments.get(name, default), dims) for name, default in (("stride", 1), ("output_padding", 0))
    )
    problem = problem_of_call(
        read.meta["val"],
        weight,
        stride,
        padding,
        dilation,
        arguments.get("groups", 1),
        is_transposed=is_transposed,
        output_padding=output_padding,
        memory_format=MemoryFormat.CHANNELS_LAST,
    )
    if problem is None:
        return None
    return Fused(nodes, read, problem, weight.detach(), None if bias is None else bias.detach(), output_padding)


def _numeric_padding(padding: Any, extent: Sequence[int], dilation: Sizes) -> Sizes | None:
    """Return the padding of a filter, if it is the same on both sides."""
    if padding != "same":
        return sizes(0 if padding == "valid" else padding, len(extent))
    totals = [step * (size - 1) for step, size in zip(dilation, extent, strict=True)]
    return None if any(total % 2 for total in totals) else tuple(total // 2 for total in totals)


def _with_padding_before(node: Node, padding: Sizes) -> Sizes | None:
    """Return the padding of a convolution and of the operator before it, which only it reads; None if that is not one.

    The first number is that above, or before the first frame; on the other side there may be less: causal padding.
    """
    before = node.args[0]
    if before.target not in PADS or _only_reader(before) is not node:
        return None
    arguments = arguments_of(before)
    sides = list(zip(arguments["pad"][::2], arguments["pad"][1::2], strict=True))
    if arguments.get("mode", "constant") != "constant" or arguments.get("value") or len(sides) > len(padding):
        return None
    sides += [(0, 0)] * (len(padding) - len(sides))
    *inner, (first, last) = sides
    if any(low != high for low, high in inner) or min(map(min, sides)) < 0 or last > first:
        return None
    return tuple(size + low for size, (low, _) in zip(padding, reversed(sides), strict=True))


def _extend(fused: Fused, constants: Mapping[str, Tensor], taken: set[Node]) -> None:
    """Add the nodes that can be computed with a convolution: batch norm, a factor, an addition, an activation."""
    y, is_transposed = fused.nodes[-1], fused.problem.operation is Operation.BACKWARD_DATA
    following = _only_reader(y)
    if following is not None and following.target is NORM and y is following.args[0]:
        normed = _only_reader(following)
        is_foldable = normed is not None and normed.target is operator.getitem and normed.args[1] == 0
        if is_foldable and _fold_norm(fused, following, constants):
            fused.nodes += [following, normed]
            following = _only_reader(normed)
    if following is not None and _fold_factor(fused, following, constants):
        fused.nodes.append(following)
        following = _only_reader(following)
    if following is not None and following not in taken and not is_transposed:
        fused.added = _added(following, fused.nodes[-1])
        if fused.added is not None:
            fused.nodes.append(following)
            following = _only_reader(following)
    if following is not None and following not in taken and following.op == "call_function":
        activation = function_of(following.target, following.args, following.kwargs)
        if activation in ACTIVATIONS:
            fused.activation = activation
            fused.nodes.append(following)


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _added(node: Node, y: Node) -> Node | None:
    """Return what is added to y, if the node adds another result of the same shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    addend = second if first is y else first
    if not isinstance(addend, fx.Node) or addend is y or addend.op != "call_function":
        return None
    value, sum_value = addend.meta.get("val"), y.meta["val"]
    is_alike = isinstance(value, Tensor) and (value.shape, value.dtype) == (sum_value.shape, sum_value.dtype)
    return addend if is_alike else None


def _fold_norm(fused: Fused, norm: Node, constants: Mapping[str, Tensor]) -> bool:
    """Fold batch norm into the filter and the bias, in float64, rounded once; return whether that was possible."""
    is_transposed = fused.problem.operation is Operation.BACKWARD_DATA
    *nodes, _, eps = norm.args[1:]
    are_constants = all(node is None or node.name in constants for node in nodes)
    if not are_constants or (is_transposed and fused.problem.groups > 1):
        return False
    scale, shift, mean, variance = (None if node is None else constants[node.name].double() for node in nodes)
    if mean is None or variance is None:
        return False
    bias = None if fused.bias is None else fused.bias.double()
    weight, bias = fuse_conv_bn_weights(fused.weight.double(), bias, mean, variance, eps, scale, shift, is_transposed)
    return _fold(fused, weight, bias)


def _fold_factor(fused: Fused, node: Node, constants: Mapping[str, Tensor]) -> bool:
    """Fold a constant factor, of all channels or of each, as ``_fold_norm`` does."""
    y, dims = fused.nodes[-1], fused.weight.dim()
    if node.target is not aten.mul.Tensor or node.kwargs:
        return False
    first, second = node.args
    factor: Any = second if first is y else first
    if not isinstance(factor, (int, float)):
        factor, of_channels = constants.get(getattr(factor, "name", "")), (shape_of(y)[1], *[1] * (dims - 2))
        if factor is None or factor.dtype != fused.weight.dtype or factor.shape not in (of_channels, (1, *of_channels)):
            return False
        if fused.problem.operation is Operation.BACKWARD_DATA:
            return False  # a transposed filter has the channels of y elsewhere
        factor = factor.double().flatten()
    weight = fused.weight.double() * (factor.view(-1, *[1] * (dims - 1)) if isinstance(factor, Tensor) else factor)
    return _fold(fused, weight, None if fused.bias is None else fused.bias.double() * factor)


def _fold(fused: Fused, weight: Tensor, bias: Tensor | None) -> bool:
    """Replace the filter and the bias, each rounded once; return whether all numbers are finite then."""
    dtype = fused.weight.dtype
    weight, bias = weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype)
    if not (weight.isfinite().all() and (bias is None or bias.isfinite().all())):
        return False
    fused.weight, fused.bias = weight, bias
    return True
