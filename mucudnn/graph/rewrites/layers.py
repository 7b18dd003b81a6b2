"""Exact rewrites of a graph of ATen, in place, before it becomes one of ours. Results are equal, but for rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from mucudnn.graph.nodes import Node, arguments_of, is_pointwise, is_result, new_call, new_view, shape_of
from mucudnn.graph.operators.operator import VIEWS, aten, norm_of_channels


def compute_constants(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Compute what depends on constants only, such as standardized filters, once.

    constants: by name of the node; what is computed is added.
    """
    for node in graph.nodes:
        is_called = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
        if not is_called or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        if is_result(node) or not all(operand.name in constants for operand in node.all_input_nodes):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: constants[operand.name])
        value = node.target(*args, **kwargs)
        if isinstance(value, Tensor):
            constants[node.name] = value


def join_norms(graph: fx.Graph) -> None:
    """Replace the parts of ``torch.nn.functional.normalize`` over channels by a call of it."""
    for node in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        x, norm = node.args
        if getattr(norm, "target", None) is aten.expand.default:
            norm = norm.args[0]
        if getattr(norm, "target", None) is not aten.clamp_min.default:
            continue
        length, eps = norm.args
        if length.target is aten.linalg_vector_norm.default and length.args == (x, 2.0, [1], True):
            node.target, node.args = F.normalize, (x, 2.0, 1, eps)


# Layers of pixels, (N, H, W, C), such as ConvNeXt's, become layers of images: the rows of both are the same in memory

_TO_PIXELS, _TO_CHANNELS = [0, 2, 3, 1], [0, 3, 1, 2]


def pixels_as_images(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Replace what is computed of permuted images, (N, H, W, C), by the same of the images, in place.

    Layer norms over the channels, linear layers of constants, and what is computed of each element by itself.

    constants: by name of the node; the filters of the convolutions are added.
    """
    images: dict[fx.Node, fx.Node] = {}  # (N, H, W, C) -> (N, C, H, W)
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or len(shape_of(node)) != 4:
            continue
        dims = list(node.args[1]) if node.target is aten.permute.default else None
        if dims == _TO_PIXELS and node.args[0].op == "call_function":
            images[node] = node.args[0]
        elif dims == _TO_CHANNELS and node.args[0] in images:
            node.replace_all_uses_with(images[node.args[0]])
            graph.erase_node(node)
        elif any(operand in images for operand in node.all_input_nodes):
            with graph.inserting_before(node):
                image = _of_images(graph, node, images, constants)
                if image is None:
                    continue
                pixels = new_call(graph, aten.permute.default, (image, _TO_PIXELS), node.meta["val"])
            images[pixels] = image
            node.replace_all_uses_with(pixels)
            graph.erase_node(node)


def _of_images(
    graph: fx.Graph, node: Node, images: dict[fx.Node, fx.Node], constants: dict[str, Tensor]
) -> fx.Node | None:
    """Add the call that computes of images what a node computes of their pixels; return None if there is none."""
    value, arguments = node.meta["val"].permute(_TO_CHANNELS), arguments_of(node)
    if node.target is aten.linear.default and arguments["weight"].name in constants:
        filters = _filters_of(graph, arguments["weight"], constants)
        return new_call(graph, aten.conv2d.default, (images[arguments["input"]], filters, arguments.get("bias")), value)
    if node.target is aten.layer_norm.default and len(arguments["normalized_shape"]) == 1:
        named = (arguments.get(name) for name in ("weight", "bias"))
        return new_call(
            graph, norm_of_channels, (images[arguments["input"]], *named, arguments.get("eps", 1e-5)), value
        )
    if not is_pointwise(node.target) or any(operand not in images for operand in node.all_input_nodes):
        return None
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), images.__getitem__)
    return new_call(graph, node.target, args, value, kwargs)


# Linear layers become convolutions of images of one pixel, which read their filters faster than torch's products do

_BETWEEN_LINEAR = {
    *(aten.relu.default, aten.silu.default, aten.hardtanh.default, aten.dropout.default, aten.clone.default),
}


def linear_as_convolutions(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Replace linear layers of constants on (N, C) by 1x1 convolutions of (N, C, 1, 1), in place.

    constants: by name of the node; the filters of the convolutions are added.
    """
    images: dict[fx.Node, fx.Node] = {}  # (N, C) -> (N, C, 1, 1)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args:
            continue
        x, shape = node.args[0], shape_of(node)
        x_shape = shape_of(x)
        if node.target in VIEWS and len(x_shape) == 4 and x_shape == (*shape, 1, 1):
            images[node] = x
        elif node.target is aten.mean.dim:
            if len(x_shape) == 4 and {dim % 4 for dim in node.args[1] or ()} == {2, 3} and len(shape) == 2:
                _replace(graph, node, (x, node.args[1], True), node.target, images)
        elif node.target in _BETWEEN_LINEAR and x in images:
            _replace(graph, node, (images[x], *node.args[1:]), node.target, images)
        elif node.target is aten.linear.default and len(x_shape) == 2 and node.args[1].name in constants:
            with graph.inserting_before(node):
                image = images.get(x) or new_view(graph, x, (*x_shape, 1, 1))
                filters = _filters_of(graph, node.args[1], constants)
            _replace(graph, node, (image, filters, *node.args[2:]), aten.conv2d.default, images)


def _filters_of(graph: fx.Graph, weight: fx.Node, constants: dict[str, Tensor]) -> fx.Node:
    """Add the filters, (K, C, 1, 1), that compute what a linear layer with this weight, (K, C), does."""
    filters = new_view(graph, weight, (*shape_of(weight), 1, 1))
    constants[filters.name] = constants[weight.name].view(*shape_of(weight), 1, 1)
    return filters


def _replace(graph: fx.Graph, node: Node, args: tuple[Any, ...], target: Any, images: dict[fx.Node, fx.Node]) -> None:
    """Replace a node on (N, C) by a call on (N, C, 1, 1), followed by a view of its result."""
    with graph.inserting_before(node):
        image = new_call(graph, target, args, node.meta["val"].view(*shape_of(node), 1, 1), node.kwargs)
        viewed = new_view(graph, image, shape_of(node))
    images[viewed] = image
    node.replace_all_uses_with(viewed)
    graph.erase_node(node)
