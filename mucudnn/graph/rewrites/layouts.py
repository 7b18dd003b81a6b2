"""Operators on views of volumes become operators on the volumes, whose frames can be bands.

Models view frames as a batch of images, (N * D, C, H, W), or move the channels behind all others, (N, D, H, W, C). Here
an operator on such a view is replaced by one on the volume, followed by the view; views that undo each other disappear.
Where bands are to have rows of all frames instead, all volumes become views of volumes (N, C, H, D, W).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from mucudnn.graph.frame_by_frame import frame_by_frame
from mucudnn.graph.makers import (
    ALONG_CHANNELS,
    CONCATENATIONS,
    IDENTITIES,
    NORM,
    PADS,
    Node,
    arguments_of,
    is_pointwise,
    shape_of,
    sizes,
)
from mucudnn.graph.moves import depth_to_space
from mucudnn.graph.operators import VIEWS, aten
from mucudnn.graph.rewrites.frame_by_frame import join_frames

T = TypeVar("T")

_SAME, _BY_FRAME, _BY_ROW = (0, 1, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 3, 2, 4)
_COPIES = {aten.clone.default, aten.contiguous.default, aten.to.dtype, aten._to_copy.default, aten.type_as.default}
_CASTS = {aten.to.dtype, aten._to_copy.default}
_RESIZES = {
    aten.upsample_nearest2d.vec: aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact2d.vec: aten._upsample_nearest_exact3d.default,
}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
# Operators whose arguments of three numbers are for frames, rows and columns, and those that have none
_SPATIAL = {
    *(aten.conv3d.default, aten.conv3d.padding, aten.conv_transpose3d.input),
    *(aten.max_pool3d.default, aten.avg_pool3d.default, aten.adaptive_avg_pool3d.default),
    *(aten.upsample_nearest3d.vec, aten._upsample_nearest_exact3d.vec, aten.upsample_trilinear3d.vec),
    *(aten.upsample_nearest3d.default, aten._upsample_nearest_exact3d.default, aten.upsample_trilinear3d.default),
    *(aten.group_norm.default, aten.instance_norm.default, NORM),
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

    def in_order_of_volume(self, values: Sequence[T]) -> list[T]:
        """Return what there is for frames, rows and columns of the view in the order of the volume's."""
        return [values[self.order.index(dim) - 2] for dim in (2, 3, 4)]

    def dimension(self, dim: int) -> int:
        """Return the dimension of the volume that one of the view is; of a batch, not the first."""
        return self.order[dim % 4 + 1 if self.is_batch else dim % 5]


def move_views(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Move views of volumes behind operators, in place. constants: by name of the node; more are added."""
    mover = _Mover(graph, constants)
    views = mover.views
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
            if node.target in VIEWS and len(shape) == 4:
                join_frames(node, {one for one, view in views.items() if view.is_batch}, constants)
            mover.move(node)


def put_rows_first(graph: fx.Graph, constants: dict[str, Tensor], samples: int) -> None:
    """Make volumes (N, C, D, H, W) views of volumes (N, C, H, D, W), of which rows can be bands, in place.

    constants: by name of the node; more are added. samples: N.
    """
    for node in [one for one in graph.nodes if one.op == "call_function" and one.target in _SPLITS]:
        _slice_instead(graph, node)
    mover = _Mover(graph, constants)
    views = mover.views
    for node in list(graph.nodes):
        value = node.meta.get("val")
        x: Any = node.all_input_nodes[0] if node.op == "call_function" and node.all_input_nodes else None
        if x in views and node.target in _COPIES | IDENTITIES and value.dtype == x.meta["val"].dtype:
            views[node] = views[x]
        elif x in views and node.target in VIEWS and value.dim() == 4:
            n, c, h, d, w = shape_of(views[x].volume)
            if (n, c, h, w, 1) == (*value.shape, d):  # the image that a clip of one frame has
                with graph.inserting_before(node):
                    image = _call(graph, aten.view.default, (views[x].volume, [n, c, h, w]), {}, value)
                node.replace_all_uses_with(image)
        elif node.op == "call_function" and any(one in views for one in node.all_input_nodes):
            mover.move(node)
        is_volume = isinstance(value, Tensor) and value.dim() == 5 and value.is_floating_point()
        if is_volume and node.users and node not in views and len(value) == samples and node.name not in constants:
            _make_rows_first(graph, node, x, views)


def _make_rows_first(graph: fx.Graph, node: Node, x: Any, views: dict[Any, _View]) -> None:
    """Let the readers of a volume that stays (N, C, D, H, W) read a view of it as (N, C, H, D, W). x: what it reads."""
    value = node.meta["val"]
    call: tuple[Any, tuple[Any, ...]] = aten.transpose.int, (node, 2, 3)
    if node.target in (*VIEWS, aten.unsqueeze.default) and shape_of(x) == (*value.shape[:2], *value.shape[3:]):
        call = aten.view.default, (x, list(value.transpose(2, 3).shape))  # a clip of one frame, of an image
    with graph.inserting_after(node):
        volume = _call(graph, *call, {}, value.transpose(2, 3))
    with graph.inserting_after(volume):
        moved = _call(graph, aten.permute.default, (volume, list(_BY_ROW)), {}, value)
    node.replace_all_uses_with(moved, lambda user: user not in (volume, moved))
    views[moved] = _View(volume, _BY_ROW)


def _slice_instead(graph: fx.Graph, node: Node) -> None:
    """Replace the parts that a split has by slices."""
    x, given, start = node.args[0], arguments_of(node), 0
    dim = given.get("dim", 0)
    for index, part in enumerate(node.meta["val"]):
        size = part.shape[dim]
        for user in [one for one in node.users if one.args[1] == index]:
            with graph.inserting_before(user):
                user.replace_all_uses_with(_call(graph, aten.slice.Tensor, (x, dim, start, start + size), {}, part))
        start += size


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


_Called: TypeAlias = "tuple[Any, tuple[Any, ...], Mapping[str, Any]]"  # target, arguments by position and by name


class _Mover:
    """Replaces operators on views of volumes by operators on the volumes.

    constants: by name of the node; more are added. views: of nodes.
    """

    def __init__(self, graph: fx.Graph, constants: dict[str, Tensor]) -> None:
        self.graph, self.constants = graph, constants
        self.views: dict[Any, _View] = {}

    def move(self, node: Node) -> None:
        """Replace an operator on views of volumes by one on the volumes and a view of its result, if there is one."""
        graph, views = self.graph, self.views
        read = [views[one] for one in node.all_input_nodes if one in views]
        alike = {(one.order, one.is_batch, one.is_batch and one.volume.meta["val"].shape[2]) for one in read}
        if len(alike) != 1 or read[0].order == _SAME:
            return
        if any(one not in views and one.name not in self.constants for one in node.all_input_nodes):
            return
        replaced, view = [node], read[0]
        if node.target is NORM:
            replaced = [*node.users]
            if not replaced or any(one.args[1] for one in replaced):
                return  # nothing is read, or its mean and variance
        value = replaced[0].meta["val"]
        if not isinstance(value, Tensor) or value.dim() != (4 if view.is_batch else 5):
            return
        with graph.inserting_before(node):
            made = self._on_volumes(node, view)
            if made is None:
                return
            volume = _call(graph, *made, view.undone(value))
            if node.target is NORM:
                volume.meta["val"] = (view.undone(value), *node.meta["val"][1:])
                volume = _call(graph, operator.getitem, (volume, 0), {}, view.undone(value))
            moved = _call(
                graph, aten.permute.default, (volume, list(view.order)), {}, volume.meta["val"].permute(view.order)
            )
            views[moved] = _View(volume, view.order)
            if view.is_batch:
                moved = _call(graph, aten.view.default, (moved, list(value.shape)), {}, value)
                views[moved] = _View(volume, view.order, is_batch=True)
        for one in replaced:
            one.replace_all_uses_with(moved)
            graph.erase_node(one)
        if node.target is NORM:
            graph.erase_node(node)

    def _on_volumes(self, node: Node, view: _View) -> _Called | None:
        """Return the operator on volumes that does what a node does on views of them, with its arguments."""
        target, value = node.target, node.meta["val"]
        is_spatial = not view.is_batch and view.order[:2] == _SAME[:2]
        if target is frame_by_frame:
            function, *images = node.args
            return (target, (function, *(self.views[one].volume for one in images)), {}) if view.is_batch else None
        if target in (depth_to_space, F.normalize) and is_spatial:
            x, *others = node.args
            if target is depth_to_space:
                ((channels, *moved),) = others
                others = [(channels, *view.in_order_of_volume(moved))]
            return target, (self.views[x].volume, *others), {}
        if not isinstance(target, torch._ops.OpOverload):
            return None
        if is_pointwise(target) or target in _CASTS:
            return self._pointwise(node, view)
        if target in CONCATENATIONS and is_spatial:
            return self._reordered(node, view)
        if node.args[0] not in self.views:
            return None
        volume, given = self.views[node.args[0]].volume, arguments_of(node)
        if target in ALONG_CHANNELS:
            dims = given.get("dim")
            dims = dims if isinstance(dims, (list, tuple)) else [dims]
            if None in dims or not dims or (view.is_batch and any(dim % 4 == 0 for dim in dims)):
                return None
            moved = [view.dimension(dim) for dim in dims]
            return _changed(node, {"self": volume, "dim": moved[0] if isinstance(given["dim"], int) else moved})
        if target is aten.expand.default:
            return target, (volume, list(view.undone(value).shape)), {}
        if not view.is_batch:
            return self._reordered(node, view) if is_spatial else None
        if target is aten.conv2d.default and isinstance(given.get("padding", 0), (int, list, tuple)):
            filters = self._constant(given["weight"], self.constants[given["weight"].name].unsqueeze(2))
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

    def _pointwise(self, node: Node, view: _View) -> _Called | None:
        """Return what ``_on_volumes`` does, for an operator on each element of views and constants."""
        nodes, dims = {}, node.meta["val"].dim()
        for one in node.all_input_nodes:
            if one in self.views:
                nodes[one] = self.views[one].volume
                continue
            constant = self.constants[one.name]
            constant = constant.view(*(1,) * (dims - constant.dim()), *constant.shape)
            if view.is_batch and len(constant) > 1:
                return None
            nodes[one] = self._constant(one, view.undone(constant))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), nodes.__getitem__)
        return node.target, args, kwargs

    def _reordered(self, node: Node, view: _View) -> _Called | None:
        """Return what ``_on_volumes`` does, for views whose frames, rows and columns are in another order."""
        target, given = node.target, arguments_of(node)
        x = next(iter(given))
        changes: dict[str, Any] = {x: self.views[node.args[0]].volume} if node.args[0] in self.views else {}
        if target in CONCATENATIONS:
            changes = {"tensors": [self.views[one].volume for one in given["tensors"]]}
        if target in CONCATENATIONS or target is aten.slice.Tensor:
            changes["dim"] = view.dimension(given.get("dim", 0))
        elif target is aten.repeat.default:
            changes["repeats"] = [*given["repeats"][:2], *view.in_order_of_volume(given["repeats"][2:])]
        elif target in PADS:
            sides = [*given["pad"], *(0,) * (10 - len(given["pad"]))]
            pairs = view.in_order_of_volume([sides[4:6], sides[2:4], sides[0:2]])
            if any(sides[6:]):
                return None
            changes["pad"] = [side for pair in reversed(pairs) for side in pair]
        elif target in _SPATIAL:
            for name, of_name in given.items():
                if isinstance(of_name, (list, tuple)) and len(of_name) == 3:
                    changes[name] = view.in_order_of_volume(of_name)
            scales = [given.get(f"scales_{name}") for name in "dhw"]
            if any(scales):
                changes |= zip(("scales_d", "scales_h", "scales_w"), view.in_order_of_volume(scales), strict=True)
            filters = given.get("weight")
            if filters is not None and len(shape_of(filters)) == 5:
                changes["weight"] = self._constant(filters, view.undone(self.constants[filters.name]))
        else:
            return None
        return _changed(node, changes)

    def _constant(self, one: Node, to: Tensor) -> Node:
        """Return a constant for volumes in place of one for views."""
        made = _call(self.graph, aten.reshape.default, (one, list(to.shape)), {}, to)
        self.constants[made.name] = to
        return made


def _changed(node: Node, changes: Mapping[str, Any]) -> _Called:
    """Return the call of a node with other values of some of its arguments, by name."""
    names = [one.name for one in node.target._schema.arguments]
    args = tuple(changes.get(name, value) for name, value in zip(names, node.args, strict=False))
    return node.target, args, {name: changes.get(name, value) for name, value in node.kwargs.items()}
