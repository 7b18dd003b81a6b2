"""What is changed in an exported graph before its operators are made.

Convolutions take in what surrounds them, folded into their filters or as their epilogues. Linear layers become
convolutions of images of one pixel, which read their filters faster than torch's products do.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, fx
from torch.nn.utils.fusion import fuse_conv_bn_weights

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.graph.operators import VIEWS, aten, function_of
from mucudnn.kernels.algorithm import ACTIVATIONS
from mucudnn.running.problems import problem_of_call

Node: TypeAlias = Any  # a torch.fx.Node, or what else is an argument of one

NORM = aten._native_batch_norm_legit_no_training.default
_CONVOLUTIONS = {
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv_transpose2d.input,
    aten.convolution.default,
}
_BETWEEN_LINEAR = {
    aten.relu.default,
    aten.silu.default,
    aten.hardtanh.default,
    aten.dropout.default,
    aten.clone.default,
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


def fused_convolutions(graph: fx.Graph, constants: Mapping[str, Tensor], samples: int) -> dict[Node, Fused]:
    """Return what is computed with each convolution of constants, by the node that has the result.

    constants: by name of the node. The later of two convolutions that are added takes the addition.
    """
    found: dict[Node, Fused] = {}
    taken: set[Node] = set()
    for node in reversed(graph.nodes):
        fused = None
        if node.op == "call_function" and node.target in _CONVOLUTIONS:
            fused = _convolution_at(node, constants, samples)
        if fused is not None:
            _extend(fused, constants, taken)
            taken.update(fused.nodes)
            found[fused.nodes[-1]] = fused
    return found


def _convolution_at(node: Node, constants: Mapping[str, Tensor], samples: int) -> Fused | None:
    """Return a convolution by itself; None for one that is a barrier."""
    given = arguments_of(node)
    weight, bias = (constants.get(getattr(given.get(name), "name", "")) for name in ("weight", "bias"))
    x = getattr(given["input"], "meta", {}).get("val")
    if weight is None or (given.get("bias") is not None and bias is None):
        return None
    if not isinstance(x, Tensor) or x.dim() != 4 or weight.dim() != 4:
        return None
    is_transposed = bool(given.get("transposed")) or node.target is aten.conv_transpose2d.input
    padding, dilation = given.get("padding", 0), two(given.get("dilation", 1))
    if padding == "same":
        totals = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
        if any(total % 2 for total in totals):
            return None
        padding = [total // 2 for total in totals]
    elif padding == "valid":
        padding = 0
    if x.dtype != weight.dtype or x.shape[0] != samples:
        return None
    output_padding = two(given.get("output_padding", 0))
    problem = problem_of_call(
        *(x, weight, two(given.get("stride", 1)), two(padding), dilation, given.get("groups", 1)),
        is_transposed=is_transposed,
        output_padding=output_padding,
        memory_format=MemoryFormat.CHANNELS_LAST,
    )
    if problem is None:
        return None
    return Fused([node], problem, weight.detach(), None if bias is None else bias.detach(), output_padding)


def _extend(fused: Fused, constants: Mapping[str, Tensor], taken: set[Node]) -> None:
    """Add the nodes that can be computed with a convolution: batch norm, a factor, an addition, an activation."""
    y, is_transposed = fused.nodes[0], fused.problem.operation is Operation.BACKWARD_DATA
    following = _only_reader(y)
    if following is not None and following.target is NORM and y is following.args[0]:
        normed = _only_reader(following)
        is_foldable = normed is not None and normed.target is operator.getitem and normed.args[1] == 0
        if is_foldable and _fold_norm(fused, following, constants):
            fused.nodes += [following, normed]
            following = _only_reader(normed)
    if following is not None and following.target is aten.mul.Tensor and isinstance(following.args[1], (int, float)):
        fused.weight = fused.weight * following.args[1]
        fused.bias = None if fused.bias is None else fused.bias * following.args[1]
        fused.nodes.append(following)
        following = _only_reader(following)
    if following is not None and following not in taken and not is_transposed:
        other = _other_of_sum(following, fused.nodes[-1])
        if other is not None:
            fused.added = other
            fused.nodes.append(following)
            following = _only_reader(following)
    if following is not None and following not in taken and following.op == "call_function":
        activation = function_of(following.target, following.args)
        if activation in ACTIVATIONS:
            fused.activation = activation
            fused.nodes.append(following)


def _only_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_of_sum(node: Node, y: Node) -> Node | None:
    """Return what is added to y, if the node adds another result of the same shape and dtype."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    first, second = node.args
    other = second if first is y else first
    if not isinstance(other, fx.Node) or other is y or other.op != "call_function":
        return None
    value, own = other.meta.get("val"), y.meta["val"]
    is_alike = isinstance(value, Tensor) and own.shape == value.shape and own.dtype == value.dtype
    return other if is_alike else None


def _fold_norm(fused: Fused, norm: Node, constants: Mapping[str, Tensor]) -> bool:
    """Fold batch norm into the filter and the bias, in float64, rounded once; return whether that was possible."""
    is_transposed = fused.problem.operation is Operation.BACKWARD_DATA
    *nodes, _, eps = norm.args[1:]
    given = [node for node in nodes if node is not None]
    if (is_transposed and fused.problem.groups > 1) or any(node.name not in constants for node in given):
        return False
    scale, shift, mean, variance = (None if node is None else constants[node.name].double() for node in nodes)
    if mean is None or variance is None:
        return False
    bias = None if fused.bias is None else fused.bias.double()
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


# Linear layers


def linear_as_convolutions(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Replace linear layers of constants on (N, C) by 1x1 convolutions of (N, C, 1, 1), in place.

    constants: by name of the node; the filters of the convolutions are added.
    """
    images: dict[fx.Node, fx.Node] = {}  # (N, C) -> (N, C, 1, 1)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args:
            continue
        x, shape = node.args[0], _shape(node)
        of_x = _shape(x)
        if node.target in VIEWS and len(of_x) == 4 and of_x == (*shape, 1, 1):
            images[node] = x
        elif node.target is aten.mean.dim:
            if len(of_x) == 4 and {dim % 4 for dim in node.args[1] or ()} == {2, 3} and len(shape) == 2:
                _replace(graph, node, (x, node.args[1], True), node.target, images)
        elif node.target in _BETWEEN_LINEAR and x in images:
            _replace(graph, node, (images[x], *node.args[1:]), node.target, images)
        elif node.target is aten.linear.default and len(of_x) == 2 and node.args[1].name in constants:
            weight = node.args[1]
            with graph.inserting_before(node):
                image = images.get(x) or _viewed(graph, x, (*of_x, 1, 1))
                filters = _viewed(graph, weight, (*_shape(weight), 1, 1))
            constants[filters.name] = constants[weight.name].view(*_shape(weight), 1, 1)
            _replace(graph, node, (image, filters, *node.args[2:]), aten.conv2d.default, images)
    graph.eliminate_dead_code()


def _replace(graph: fx.Graph, node: Node, args: tuple[Any, ...], target: Any, images: dict[fx.Node, fx.Node]) -> None:
    """Replace a node on (N, C) by a call on (N, C, 1, 1), followed by a view of its result."""
    with graph.inserting_before(node):
        made = graph.call_function(target, args, node.kwargs)
        made.meta["val"] = node.meta["val"].view(*_shape(node), 1, 1)
        viewed = _viewed(graph, made, _shape(node))
    images[viewed] = made
    node.replace_all_uses_with(viewed)
    graph.erase_node(node)


def _viewed(graph: fx.Graph, node: Node, shape: tuple[int, ...]) -> fx.Node:
    made = graph.call_function(aten.view.default, (node, list(shape)))
    made.meta["val"] = node.meta["val"].reshape(shape)
    return made


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()
