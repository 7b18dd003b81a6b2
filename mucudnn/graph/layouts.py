"""Operators on views of volumes become operators on the volumes, whose frames can be bands.

Models view frames as a batch of images, (N * D, C, H, W), or move the channels behind all others, (N, D, H, W, C). Here
an operator on such a view is replaced by one on the volume, followed by the view; views that undo each other disappear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from mucudnn.graph.makers import ALONG_CHANNELS, PADS, Node, arguments_of, is_pointwise, sizes
from mucudnn.graph.operators import VIEWS, aten

_SAME, _BY_FRAME = (0, 1, 2, 3, 4), (0, 2, 1, 3, 4)
_COPIES = {aten.clone.default, aten.contiguous.default, aten.to.dtype, aten._to_copy.default, aten.type_as.default}
_RESIZES = {
    aten.upsample_nearest2d.vec: aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact2d.vec: aten._upsample_nearest_exact3d.default,
}


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a volume: its dimensions in another order; if ``is_batch``, the first two as one, (N * D, C, H, W)."""

    volume: Node
    order: tuple[int, ...] = _SAME
    is_batch: bool = False

    def undone(self, value: Tensor) -> Tensor:
        """Return a tensor of the shape of the view, or of which each dimension may be 1, as a volume."""
        if self.is_batch:
            depth = self.volume.meta["val"].shape[2]
            value = value.reshape(-1, depth if len(value) > 1 else 1, *value.shape[1:])
        return value.permute([self.order.index(dim) for dim in _SAME])

    def dimension(self, dim: int) -> int:
        """Return the dimension of the volume that one of the view is; of a batch, not the first."""
        return self.order[dim % 4 + 1 if self.is_batch else dim % 5]


def move_views(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Move views of volumes behind operators, in place. constants: by name of the node; more are added."""
    views: dict[Any, _View] = {}  # of nodes
    for node in list(graph.nodes):
        x: Any = node.args[0] if node.op == "call_function" and node.args else None
        if not _is_tensor(node) or not _is_tensor(x):
            continue
        view, shape = views.get(x, _View(x)), node.meta["val"].shape
        if node.target in (aten.permute.default, aten.transpose.int):
            if x.meta["val"].dim() == 5:
                views[node] = _View(view.volume, tuple(view.order[dim] for dim in _order_of(node)))
                if views[node].order == _SAME and view.volume.op == "call_function":
                    node.replace_all_uses_with(view.volume)
        elif node.target in VIEWS and view.order == _BY_FRAME:
            n, c, d, *frame = view.volume.meta["val"].shape
            if shape in ((n * d, c, *frame), (n, d, c, *frame)):
                views[node] = _View(view.volume, _BY_FRAME, is_batch=len(shape) == 4)
        elif node.target is aten.select.int and len(shape) == 4 and node.args[1] in (2, -3):  # a frame
            index, value = node.args[2] % x.meta["val"].shape[2], node.meta["val"].unsqueeze(2)
            with graph.inserting_before(node):
                frame = _call(graph, aten.slice.Tensor, (x, 2, index, index + 1), {}, value)
            views[node] = _View(frame, _BY_FRAME, is_batch=True)
        elif node.target is aten.unsqueeze.default and view.is_batch and view.volume.meta["val"].shape == shape:
            node.replace_all_uses_with(view.volume)
        elif node.target in _COPIES and node.meta["val"].dtype == x.meta["val"].dtype:
            if x in views:
                views[node] = view
        else:
            _move(graph, node, views, constants)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def _order_of(node: Node) -> list[int]:
    if node.target is aten.permute.default:
        return [dim % 5 for dim in node.args[1]]
    order, (first, second) = list(_SAME), (dim % 5 for dim in node.args[1:])
    order[first], order[second] = second, first
    return order


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Tensor) -> fx.Node:
    made = graph.call_function(target, args, dict(kwargs))
    made.meta["val"] = value
    return made


def _move(graph: fx.Graph, node: Node, views: dict[Any, _View], constants: dict[str, Tensor]) -> None:
    """Replace an operator on views of volumes by one on the volumes and a view of its result, if there is one."""
    read = [views[one] for one in node.all_input_nodes if one in views]
    alike = {(one.order, one.is_batch, one.volume.meta["val"].shape[2]) for one in read}
    if len(alike) != 1 or read[0].order == _SAME:
        return
    if any(one not in views and one.name not in constants for one in node.all_input_nodes):
        return
    value, view = node.meta["val"], read[0]
    if value.dim() != (4 if view.is_batch else 5):
        return
    with graph.inserting_before(node):
        made = _on_volumes(graph, node, views, view, constants)
        if made is None:
            return
        volume = _call(graph, *made, view.undone(value))
        moved = _call(
            graph, aten.permute.default, (volume, list(view.order)), {}, volume.meta["val"].permute(view.order)
        )
        views[moved] = _View(volume, view.order)
        if view.is_batch:
            moved = _call(graph, aten.view.default, (moved, list(value.shape)), {}, value)
            views[moved] = _View(volume, view.order, is_batch=True)
    node.replace_all_uses_with(moved)
    graph.erase_node(node)


def _on_volumes(
    graph: fx.Graph, node: Node, views: Mapping[Any, _View], view: _View, constants: dict[str, Tensor]
) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]] | None:
    """Return the operator on volumes that does what a node does on views of them, with its arguments."""

    def changed(one: Node, to: Tensor) -> Node:
        """Return a constant for volumes."""
        made = _call(graph, aten.reshape.default, (one, list(to.shape)), {}, to)
        constants[made.name] = to
        return made

    target, value = node.target, node.meta["val"]
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if is_pointwise(target):
        nodes = {}
        for one in node.all_input_nodes:
            if one in views:
                nodes[one] = views[one].volume
                continue
            constant = constants[one.name]
            constant = constant.view(*(1,) * (value.dim() - constant.dim()), *constant.shape)
            if view.is_batch and len(constant) > 1:
                return None
            nodes[one] = changed(one, view.undone(constant))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
        return target, args, kwargs
    if node.args[0] not in views:
        return None
    volume, given = views[node.args[0]].volume, arguments_of(node)
    if target in ALONG_CHANNELS:
        dims = given.get("dim")
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        if len(dims) != 1 or dims[0] is None or (view.is_batch and dims[0] % 4 == 0):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: volume)
        dim = view.dimension(dims[0])
        at = [one.name for one in target._schema.arguments].index("dim")
        moved = dim if isinstance(given["dim"], int) else [dim]
        return target, (*args[:at], moved, *args[at + 1 :]), kwargs
    if target is aten.expand.default:
        return target, (volume, list(view.undone(value).shape)), {}
    if not view.is_batch:
        return None
    if target is aten.conv2d.default and isinstance(given.get("padding", 0), (int, list, tuple)):
        filters = changed(given["weight"], constants[given["weight"].name].unsqueeze(2))
        steps = (
            [one, *sizes(given.get(name, one), 2)] for name, one in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        return aten.conv3d.default, (volume, filters, given.get("bias"), *steps, given.get("groups", 1)), {}
    if target in _RESIZES:
        scales = given.get("scale_factors") or (None, None)
        return _RESIZES[target], (volume, list(view.undone(value).shape[2:]), None, *scales), {}
    if target in PADS and given.get("mode", "constant") == "constant" and len(given["pad"]) <= 4:
        return target, (volume, *node.args[1:]), node.kwargs
    return None
