"""Operators on views of volumes become operators on the volumes, whose frames can be bands.

Models view frames as a batch of images, (N * D, C, H, W), or move the channels behind all others, (N, D, H, W, C). Here
an operator on such a view is replaced by one on the volume, followed by the view; views that undo each other disappear.
Where bands are to have rows of all frames instead, all volumes become views of volumes (N, C, H, D, W).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, fx

from mucudnn.graph.nodes import (
    ALONG_CHANNELS,
    CONCATENATIONS,
    IDENTITIES,
    NORM,
    PADS,
    Node,
    arguments_of,
    is_pointwise,
    new_call,
    shape_of,
    sizes,
)
from mucudnn.graph.operators.moves import depth_to_space
from mucudnn.graph.operators.operator import VIEWS, aten
from mucudnn.graph.video.frames import frame_by_frame, join_frames

T = TypeVar("T")

_SAME, _BY_FRAME, _BY_ROW = (0, 1, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 3, 2, 4)
_COPIES = {aten.clone.default, aten.contiguous.default, aten.to.dtype, aten._to_copy.default, aten.type_as.default}
_CASTS = {aten.to.dtype, aten._to_copy.default}
_SCALES = "scales_d", "scales_h", "scales_w"
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a volume: its dimensions in another order; if ``is_batch``, the first two as one, (N * D, C, H, W)."""

    volume: Node
    order: tuple[int, ...] = _SAME
    is_batch: bool = False

    @property
    def is_spatial(self) -> bool:
        """Whether only frames, rows and columns are in another order."""
        return not self.is_batch and self.order[:2] == _SAME[:2]

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
    """Move views of volumes behind operators, in place.

    constants: by name of the node; more are added.
    """
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
                frame = new_call(graph, aten.slice.Tensor, (x, 2, index, index + 1), value)
            views[node] = _View(frame, _BY_FRAME, is_batch=True)
        elif node.target is aten.unsqueeze.default and view.is_batch and view.volume.meta["val"].shape == shape:
            node.replace_all_uses_with(view.volume)
        elif node.target in _COPIES and node.meta["val"].dtype == x.meta["val"].dtype:
            if x in views:
                views[node] = view
        else:
            if node.target in VIEWS and len(shape) == 4:
                join_frames(node, {images for images, view in views.items() if view.is_batch}, constants)
            mover.move(node)


def put_rows_first(graph: fx.Graph, constants: dict[str, Tensor], samples: int) -> None:
    """Make volumes (N, C, D, H, W) views of volumes (N, C, H, D, W), of which rows can be bands, in place.

    constants: by name of the node; more are added.
    samples: N.
    """
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target in _SPLITS]:
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
                    image = new_call(graph, aten.view.default, (views[x].volume, [n, c, h, w]), value)
                node.replace_all_uses_with(image)
        elif node.op == "call_function" and any(operand in views for operand in node.all_input_nodes):
            mover.move(node)
        is_volume = isinstance(value, Tensor) and value.dim() == 5 and value.is_floating_point()
        if is_volume and node.users and node not in views and len(value) == samples and node.name not in constants:
            _make_rows_first(graph, node, x, views)


def _make_rows_first(graph: fx.Graph, node: Node, x: Any, views: dict[Any, _View]) -> None:
    """Let the readers of a volume that stays (N, C, D, H, W) read a view of it as (N, C, H, D, W).

    x: what the volume is made of.
    """
    value = node.meta["val"]
    call: tuple[Any, tuple[Any, ...]] = aten.transpose.int, (node, 2, 3)
    if node.target in (*VIEWS, aten.unsqueeze.default) and shape_of(x) == (*value.shape[:2], *value.shape[3:]):
        call = aten.view.default, (x, list(value.transpose(2, 3).shape))  # a clip of one frame, of an image
    with graph.inserting_after(node):
        volume = new_call(graph, *call, value.transpose(2, 3))
    with graph.inserting_after(volume):
        viewed = new_call(graph, aten.permute.default, (volume, list(_BY_ROW)), value)
    node.replace_all_uses_with(viewed, lambda user: user not in (volume, viewed))
    views[viewed] = _View(volume, _BY_ROW)


def _slice_instead(graph: fx.Graph, node: Node) -> None:
    """Replace the parts that a split has by slices."""
    x, dim, start = node.args[0], arguments_of(node).get("dim", 0), 0
    for index, part in enumerate(node.meta["val"]):
        stop = start + part.shape[dim]
        for user in [user for user in node.users if user.args[1] == index]:
            with graph.inserting_before(user):
                user.replace_all_uses_with(new_call(graph, aten.slice.Tensor, (x, dim, start, stop), part))
        start = stop


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def _order_of(node: Node) -> list[int]:
    if node.target is aten.permute.default:
        return [dim % 5 for dim in node.args[1]]
    order, (first, second) = list(_SAME), (dim % 5 for dim in node.args[1:])
    order[first], order[second] = second, first
    return order


_Call: TypeAlias = "tuple[Any, tuple[Any, ...], Mapping[str, Any]]"  # target, arguments by position and by name


class _Mover:
    """Replaces operators on views of volumes by operators on the volumes.

    constants: by name of the node; more are added.
    views: of nodes.
    """

    def __init__(self, graph: fx.Graph, constants: dict[str, Tensor]) -> None:
        self.graph, self.constants = graph, constants
        self.views: dict[Any, _View] = {}

    def move(self, node: Node) -> None:
        """Replace an operator on views of volumes by one on the volumes and a view of its result, if there is one."""
        graph, views = self.graph, self.views
        # All operands are constants, or views of the same kind
        views_read = [views[operand] for operand in node.all_input_nodes if operand in views]
        kinds = {(view.order, view.is_batch, view.is_batch and shape_of(view.volume)[2]) for view in views_read}
        if len(kinds) != 1 or views_read[0].order == _SAME:
            return
        if any(operand not in views and operand.name not in self.constants for operand in node.all_input_nodes):
            return
        replaced, view = [node], views_read[0]
        if node.target is NORM:
            replaced = [*node.users]
            if not replaced or any(result.args[1] for result in replaced):
                return  # nothing is read, or its mean and variance
        value = replaced[0].meta["val"]
        if not isinstance(value, Tensor) or value.dim() != (4 if view.is_batch else 5):
            return
        # The operator on volumes, and the view of its result
        with graph.inserting_before(node):
            call = self._on_volumes(node, view)
            if call is None:
                return
            target, args, kwargs = call
            volume = view.undone(value)
            if node.target is NORM:
                parts = new_call(graph, target, args, (volume, *node.meta["val"][1:]), kwargs)
                target, args, kwargs = operator.getitem, (parts, 0), {}
            result = new_call(graph, target, args, volume, kwargs)
            viewed = new_call(graph, aten.permute.default, (result, list(view.order)), volume.permute(view.order))
            views[viewed] = _View(result, view.order)
            if view.is_batch:
                viewed = new_call(graph, aten.view.default, (viewed, list(value.shape)), value)
                views[viewed] = _View(result, view.order, is_batch=True)
        # In place of the operator
        for result in replaced:
            result.replace_all_uses_with(viewed)
            graph.erase_node(result)
        if node.target is NORM:
            graph.erase_node(node)

    def _on_volumes(self, node: Node, view: _View) -> _Call | None:
        """Return the operator on volumes that does what a node does on views of them, with its arguments."""
        if is_pointwise(node.target) or node.target in _CASTS:
            return _pointwise(self, node, view)
        x, on_volumes = node.args[0], _ON_VOLUMES.get(node.target)
        if on_volumes is None or (isinstance(x, fx.Node) and x not in self.views):
            return None
        return on_volumes(self, node, view)

    def volume(self, node: Node, view: _View) -> Node | None:
        """Return the volume of which a node is a view, or a constant in place of one; None if its samples differ."""
        if node in self.views:
            return self.views[node].volume
        constant = self.constants[node.name]
        dims = 4 if view.is_batch else 5
        constant = constant.view(*(1,) * (dims - constant.dim()), *constant.shape)
        if view.is_batch and len(constant) > 1:
            return None
        return self.constant(node, view.undone(constant))

    def constant(self, node: Node, value: Tensor) -> Node:
        """Return a constant for volumes in place of one for views."""
        reshaped = new_call(self.graph, aten.reshape.default, (node, list(value.shape)), value)
        self.constants[reshaped.name] = value
        return reshaped

    def changed(self, node: Node, changes: Mapping[str, Any]) -> _Call:
        """Return a call on the volume of its first operand, with other values of some arguments, by name."""
        first, *names = [argument.name for argument in node.target._schema.arguments]
        changes = {first: self.views[node.args[0]].volume, **changes} if first not in changes else changes
        args = tuple(changes.get(name, value) for name, value in zip((first, *names), node.args, strict=False))
        return node.target, args, {name: changes.get(name, value) for name, value in node.kwargs.items()}


# What takes the place of a call on views, by what is called; None for views that it does not take


def _pointwise(mover: _Mover, node: Node, view: _View) -> _Call | None:
    volumes = {operand: mover.volume(operand, view) for operand in node.all_input_nodes}
    if None in volumes.values():
        return None
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), volumes.__getitem__)
    return node.target, args, kwargs


def _spatial(mover: _Mover, node: Node, view: _View) -> _Call | None:
    """Return the call for views whose frames, rows and columns are in another order."""
    if not view.is_spatial:
        return None
    arguments = arguments_of(node)
    changes: dict[str, Any] = {}
    for name, value in arguments.items():
        if name == "dim":
            changes[name] = view.dimension(value)
        elif name == "tensors":
            changes[name] = [mover.volume(tensor, view) for tensor in value]
        elif name == "repeats":
            changes[name] = [*value[:2], *view.in_order_of_volume(value[2:])]
        elif name == "weight" and len(shape_of(value)) == 5:
            changes[name] = mover.constant(value, view.undone(mover.constants[value.name]))
        elif isinstance(value, (list, tuple)) and len(value) == 3:
            changes[name] = view.in_order_of_volume(value)
    scales = [arguments.get(name) for name in _SCALES]
    if any(scales):
        changes |= zip(_SCALES, view.in_order_of_volume(scales), strict=True)
    return mover.changed(node, changes)


def _padding(mover: _Mover, node: Node, view: _View) -> _Call | None:
    arguments = arguments_of(node)
    sides = [*arguments["pad"], *(0,) * (10 - len(arguments["pad"]))]
    if view.is_batch:
        is_constant = arguments.get("mode", "constant") == "constant"
        return mover.changed(node, {}) if is_constant and len(arguments["pad"]) <= 4 else None
    if not view.is_spatial or any(sides[6:]):
        return None
    frames, rows, columns = view.in_order_of_volume([sides[4:6], sides[2:4], sides[0:2]])
    return mover.changed(node, {"pad": [*columns, *rows, *frames]})


def _along_channels(mover: _Mover, node: Node, view: _View) -> _Call | None:
    dim: Any = arguments_of(node).get("dim")
    dims = [dim] if isinstance(dim, int) else list(dim or ())
    if not dims or (view.is_batch and any(index % 4 == 0 for index in dims)):
        return None
    of_volume = [view.dimension(index) for index in dims]
    return mover.changed(node, {"dim": of_volume[0] if isinstance(dim, int) else of_volume})


def _expansion(mover: _Mover, node: Node, view: _View) -> _Call | None:
    return node.target, (mover.views[node.args[0]].volume, list(view.undone(node.meta["val"]).shape)), {}


def _depth_to_space(mover: _Mover, node: Node, view: _View) -> _Call | None:
    if not view.is_spatial:
        return None
    x, (channels, *moved) = node.args
    return depth_to_space, (mover.views[x].volume, (channels, *view.in_order_of_volume(moved))), {}


def _frame_by_frame(mover: _Mover, node: Node, view: _View) -> _Call | None:
    function, *images = node.args
    return (frame_by_frame, (function, *(mover.views[image].volume for image in images)), {}) if view.is_batch else None


def _convolution_of_frames(mover: _Mover, node: Node, view: _View) -> _Call | None:
    arguments = arguments_of(node)
    if not view.is_batch or isinstance(arguments.get("padding"), str):
        return None
    filters = mover.constant(arguments["weight"], mover.constants[arguments["weight"].name].unsqueeze(2))
    stride, padding, dilation = (
        [default, *sizes(arguments.get(name, default), 2)]
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    windows = stride, padding, dilation, arguments.get("groups", 1)
    volume = mover.views[arguments["input"]].volume
    return aten.conv3d.default, (volume, filters, arguments.get("bias"), *windows), {}


def _resize_of_frames(target: Any, mover: _Mover, node: Node, view: _View) -> _Call | None:
    """Return the call for a resizing of frames.

    target: the resizing of volumes.
    """
    if not view.is_batch:
        return None
    scales = arguments_of(node).get("scale_factors") or (None, None)
    return target, (mover.views[node.args[0]].volume, list(view.undone(node.meta["val"]).shape[2:]), None, *scales), {}


_ON_VOLUMES: dict[Any, Callable[[_Mover, Node, _View], _Call | None]] = {
    frame_by_frame: _frame_by_frame,
    depth_to_space: _depth_to_space,
    **dict.fromkeys(ALONG_CHANNELS, _along_channels),
    aten.expand.default: _expansion,
    **dict.fromkeys(PADS, _padding),
    **dict.fromkeys((*CONCATENATIONS, aten.slice.Tensor, aten.repeat.default), _spatial),
    **dict.fromkeys((aten.conv3d.default, aten.conv3d.padding, aten.conv_transpose3d.input), _spatial),
    **dict.fromkeys((aten.max_pool3d.default, aten.avg_pool3d.default, aten.adaptive_avg_pool3d.default), _spatial),
    **dict.fromkeys((aten.upsample_nearest3d.vec, aten.upsample_nearest3d.default), _spatial),
    **dict.fromkeys((aten._upsample_nearest_exact3d.vec, aten._upsample_nearest_exact3d.default), _spatial),
    **dict.fromkeys((aten.upsample_trilinear3d.vec, aten.upsample_trilinear3d.default), _spatial),
    **dict.fromkeys((aten.group_norm.default, aten.instance_norm.default, NORM), _spatial),
    aten.conv2d.default: _convolution_of_frames,
    aten.upsample_nearest2d.vec: partial(_resize_of_frames, aten.upsample_nearest3d.default),
    aten._upsample_nearest_exact2d.vec: partial(_resize_of_frames, aten._upsample_nearest_exact3d.default),
}
