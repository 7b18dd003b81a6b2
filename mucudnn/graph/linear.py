"""Linear layers as convolutions of images of one pixel, which read their filters faster than torch's products do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from mucudnn.graph.builder import Node
from mucudnn.graph.fusions import ACTIVATIONS
from mucudnn.graph.operators import VIEWS, aten

_SAME = {*ACTIVATIONS, aten.hardtanh.default, aten.dropout.default, aten.clone.default}


def linear_as_convolutions(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Replace linear layers of constants on (N, C) by 1x1 convolutions of (N, C, 1, 1), in place.

    constants: by name of the node; the filters of the convolutions are added.
    """
    images: dict[fx.Node, fx.Node] = {}  # (N, C) -> (N, C, 1, 1)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args:
            continue
        x = node.args[0]
        if node.target in VIEWS and _is_pixel(x) and _shape(node) == _shape(x)[:2]:
            images[node] = x
        elif node.target is aten.mean.dim and _is_mean_of_image(node):
            _replace(graph, node, (x, node.args[1], True), node.target, images)
        elif node.target in _SAME and x in images:
            _replace(graph, node, (images[x], *node.args[1:]), node.target, images)
        elif node.target is aten.linear.default and len(_shape(x)) == 2 and node.args[1].name in constants:
            weight = node.args[1]
            with graph.inserting_before(node):
                image = images.get(x) or _viewed(graph, x, (*_shape(x), 1, 1))
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


def _is_mean_of_image(node: Node) -> bool:
    """Return whether a mean is over rows and columns, and leaves them out."""
    return (
        len(_shape(node.args[0])) == 4 and {dim % 4 for dim in node.args[1] or ()} == {2, 3} and len(_shape(node)) == 2
    )


def _is_pixel(node: Any) -> bool:
    return len(_shape(node)) == 4 and _shape(node)[2:] == (1, 1)
