"""Exact rewrites of a graph of ATen, in place, before it becomes one of ours.

Results are equal, but for rounding. constants: tensors by name of the node, to which new ones are added.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from mucudnn.graph.makers import (
    ALONG_CHANNELS,
    CONCATENATIONS,
    IDENTITIES,
    PADS,
    Node,
    arguments_of,
    is_pointwise,
    shape_of,
)
from mucudnn.graph.operators import VIEWS, aten
from mucudnn.graph.rewrites.layouts import move_views
from mucudnn.graph.rewrites.shuffles import join_shuffles


def rewrite(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Compute constants once, and write clips of one frame and linear layers as images."""
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)  # of results, which arguments of the captured types determine
    _compute_constants(graph, constants)
    if graph.find_nodes(op="call_function", target=aten.conv3d.default):
        _Clips(graph, constants).rewrite()
    join_shuffles(graph)
    move_views(graph, constants)
    _join_norms(graph)
    _linear_as_convolutions(graph, constants)
    graph.eliminate_dead_code()


def _compute_constants(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Compute what depends on constants only, such as standardized filters, once."""
    for node in graph.nodes:
        is_called = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
        if not is_called or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        is_result = any(user.op == "output" for user in node.users)
        if is_result or not all(one.name in constants for one in node.all_input_nodes):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: constants[one.name])
        value = node.target(*args, **kwargs)
        if isinstance(value, Tensor):
            constants[node.name] = value


def _join_norms(graph: fx.Graph) -> None:
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


# Clips of one frame become images. Frames that are padded or repeated are multiples of one image, so that a convolution
# of them needs one slice of its filter, or the sum of some.

_MOVES = {
    *VIEWS,
    *IDENTITIES,
    aten.permute.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
}
_OVER_CHANNELS = {
    *ALONG_CHANNELS,
    *CONCATENATIONS,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
}
_OF_ALL_SIZES = {
    aten.group_norm.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.type_as.default,
    aten.to.dtype,
    aten._to_copy.default,
}
_RESIZES = {
    aten.upsample_nearest3d.vec: aten.upsample_nearest2d.vec,
    aten._upsample_nearest_exact3d.vec: aten._upsample_nearest_exact2d.vec,
    aten.upsample_trilinear3d.vec: aten.upsample_bilinear2d.vec,
}


_NO_OPERAND = object()


@dataclass(frozen=True)
class _Clip:
    """A clip (N, C, D, H, W) whose frames are an image (N, C, H, W), or zeros.

    factors: of each frame, 1 or 0. sides: left, right, above, below: zeros around each frame.
    """

    image: fx.Node
    factors: tuple[float, ...] = (1.0,)
    sides: tuple[int, ...] = (0, 0, 0, 0)


class _Clips:
    """The rewrite of the clips of a graph.

    images: nodes (N, C, H, W), by nodes that have the same elements in the same order. clips: those that only
    convolutions read.
    """

    def __init__(self, graph: fx.Graph, constants: dict[str, Tensor]) -> None:
        self.graph, self.constants = graph, constants
        self.images: dict[fx.Node, fx.Node] = {}
        self.clips: dict[fx.Node, _Clip] = {}

    def rewrite(self) -> None:
        for node in list(self.graph.nodes):
            if node.op != "call_function" or not hasattr(node.target, "_schema") or node.name in self.constants:
                continue
            given, shape = arguments_of(node), shape_of(node)
            values = [one for one in tree_leaves(node.meta.get("val")) if not isinstance(one, Tensor) or one.numel()]
            if node.target in _MOVES:
                self._move(node)
            elif len(shape) == 5 and (clip := self._clip_of(node, given)):
                if clip == _Clip(clip.image):
                    self.images[node] = clip.image
                else:
                    self.clips[node] = clip
            elif values and all(isinstance(one, Tensor) and one.dim() == 5 and one.shape[2] == 1 for one in values):
                self._rewrite(node, given)

    def _move(self, node: Node) -> None:
        """Note, or replace, a node that has other dimensions of size 1 than an image."""
        x, shape = node.args[0], shape_of(node)
        image, of_x = self._image(x), shape_of(x)
        if image is None or [size for size in of_x if size > 1] != [size for size in shape if size > 1]:
            return
        if node.target is aten.permute.default:
            moved = [dim % len(of_x) for dim in node.args[1] if of_x[dim] > 1]
            if moved != sorted(moved):
                return
        if shape == shape_of(image) and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(image)
        else:
            self.images[node] = image

    def _image(self, node: Any) -> fx.Node | None:
        """Return an image that has a node's elements in the same order; None if there is none."""
        if not isinstance(node, fx.Node) or node.name in self.constants:
            return None
        shape = shape_of(node)
        if node not in self.images and len(shape) == 4:
            self.images[node] = node
        elif node not in self.images and len(shape) == 5 and shape[2] == 1:
            with self.graph.inserting_after(node):
                self.images[node] = _viewed(self.graph, node, (*shape[:2], *shape[3:]))
        return self.images.get(node)

    def _clip(self, node: Any) -> _Clip | None:
        """Return a node as a clip of frames that are one image or zeros; None if it is none."""
        if node in self.clips:
            return self.clips[node]
        shape, image = shape_of(node), self._image(node)
        is_frame = image is not None and len(shape) == 5 and (*shape[:2], *shape[3:]) == shape_of(image)
        return _Clip(image) if image is not None and is_frame else None

    def _clip_of(self, node: Node, given: dict[str, Any]) -> _Clip | None:
        """Return the clip that a node makes by padding, repeating or choosing frames; None for another operator."""
        along = given.get("dim", 0) in (2, -3)
        if node.target in CONCATENATIONS and along:
            first, *others = (self._clip(one) for one in given["tensors"])
            if first is None:
                return None
            factors = first.factors
            for one in others:
                if one is None or (one.image, one.sides) != (first.image, first.sides):
                    return None
                factors += one.factors
            return _Clip(first.image, factors, first.sides)
        clip = self._clip(given.get("self"))
        if clip is None:
            return None
        if node.target in PADS:
            (*sides, before, after), mode = (*given["pad"], 0, 0, 0, 0)[:6], given.get("mode", "constant")
            if min(*sides, before, after) < 0:
                return None
            if mode == "constant" and not given.get("value"):
                sums = tuple(map(sum, zip(clip.sides, sides, strict=True)))
                return _Clip(clip.image, (0.0,) * before + clip.factors + (0.0,) * after, sums)
            if mode != "replicate" or any(clip.sides):
                return None
            with self.graph.inserting_before(node):
                image = self._padded(clip.image, sides, mode) if any(sides) else clip.image
            return _Clip(image, clip.factors[:1] * before + clip.factors + clip.factors[-1:] * after)
        if node.target is aten.slice.Tensor and along:
            factors = clip.factors[given.get("start") : given.get("end") : given.get("step", 1)]
            return _Clip(clip.image, factors, clip.sides)
        if node.target is aten.repeat.default and [*given["repeats"][:2], *given["repeats"][3:]] == [1, 1, 1, 1]:
            return _Clip(clip.image, clip.factors * given["repeats"][2], clip.sides)
        return None

    def _rewrite(self, node: Node, given: dict[str, Any]) -> None:
        """Replace a call that makes clips of one frame by one that makes images, if there is one."""
        with self.graph.inserting_before(node):
            call = self._convolution(given) if node.target is aten.conv3d.default else self._call(node, given)
            if call is None:
                return
            image = self.graph.call_function(*call)
        image.meta["val"] = tree_map_only(
            Tensor, lambda value: value.squeeze(2) if value.dim() == 5 else value, node.meta["val"]
        )
        parts = [(node, image)]
        if not shape_of(node):  # several results
            parts = []
            for user in list(node.users):
                with self.graph.inserting_before(user):
                    part = self.graph.call_function(operator.getitem, (image, user.args[1]))
                part.meta["val"] = user.meta["val"].squeeze(2)
                parts.append((user, part))
        for before, after in parts:
            with self.graph.inserting_before(before):
                viewed = _viewed(self.graph, after, shape_of(before))
            self.images[viewed] = after
            before.replace_all_uses_with(viewed)

    def _convolution(self, given: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return a convolution of one frame as one of images, by the slices of the filter that read the image."""
        clip, weight = self._clip(given["input"]), self.constants.get(given["weight"].name)
        if clip is None or weight is None:
            return None
        stride, padding, dilation = (
            [*given.get(name, default)] * (1 if len(given.get(name, default)) == 3 else 3)
            for name, default in (("stride", [1]), ("padding", [0]), ("dilation", [1]))
        )
        frames = [tap * dilation[0] - padding[0] for tap in range(weight.shape[2])]
        taps = [tap for tap, at in enumerate(frames) if 0 <= at < len(clip.factors) and clip.factors[at]]
        if not taps:
            return None
        image, sides = clip.image, clip.sides
        filters = self.graph.call_function(aten.select.int, (given["weight"], 2, taps[0]))
        filters.meta["val"] = given["weight"].meta["val"][:, :, 0]
        self.constants[filters.name] = weight[:, :, taps].sum(2, dtype=torch.float64).to(weight.dtype)
        if sides[0] == sides[1] and sides[2] == sides[3]:
            padding = [0, padding[1] + sides[2], padding[2] + sides[0]]
        else:
            image = self._padded(image, sides, "constant")
        places = stride[1:], padding[1:], dilation[1:], given.get("groups", 1)
        return aten.conv2d.default, (image, filters, given.get("bias"), *places)

    def _padded(self, image: fx.Node, sides: Sequence[int], mode: str) -> fx.Node:
        made = self.graph.call_function(aten.pad.default, (image, [*sides], mode))
        made.meta["val"] = F.pad(image.meta["val"], sides, mode)
        return made

    def _call(self, node: Node, given: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return a call on clips of one frame as one on images: target, arguments by position and by name."""
        target, args = node.target, list(node.args)
        dims = given.get("dim", ())
        if target in _RESIZES:
            target = _RESIZES[target]
            args = [one[1:] if isinstance(one, (list, tuple)) else one for one in args]
        elif target is aten.expand.default:
            args[1] = [*args[1][:2], *args[1][3:]]
        elif target in PADS and not any(args[1][4:]):
            args[1] = args[1][:4]
        elif not (is_pointwise(target) or target in _OF_ALL_SIZES or (target in _OVER_CHANNELS and dims in (1, [1]))):
            return None
        found = tree_map(self._operand, (args, {k: v for k, v in node.kwargs.items() if k != "memory_format"}))
        return None if any(one is _NO_OPERAND for one in tree_leaves(found)) else (target, tuple(found[0]), found[1])

    def _operand(self, one: Any) -> Any:
        """Return what a call on images reads in place of an operand of a call on clips of one frame."""
        if not isinstance(one, fx.Node) or len(shape_of(one)) < 3:
            return one
        shape, clip = shape_of(one), self._clip(one)
        if clip is not None:
            return clip.image if clip == _Clip(clip.image) else _NO_OPERAND
        if shape[-3] != 1:
            return _NO_OPERAND
        viewed = _viewed(self.graph, one, (*shape[:-3], *shape[-2:]))
        if one.name in self.constants:
            self.constants[viewed.name] = self.constants[one.name].squeeze(-3)
        return viewed


# Linear layers become convolutions of images of one pixel, which read their filters faster than torch's products do

_BETWEEN_LINEAR = {
    aten.relu.default,
    aten.silu.default,
    aten.hardtanh.default,
    aten.dropout.default,
    aten.clone.default,
}


def _linear_as_convolutions(graph: fx.Graph, constants: dict[str, Tensor]) -> None:
    """Replace linear layers of constants on (N, C) by 1x1 convolutions of (N, C, 1, 1), in place.

    constants: by name of the node; the filters of the convolutions are added.
    """
    images: dict[fx.Node, fx.Node] = {}  # (N, C) -> (N, C, 1, 1)
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args:
            continue
        x, shape = node.args[0], shape_of(node)
        of_x = shape_of(x)
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
                filters = _viewed(graph, weight, (*shape_of(weight), 1, 1))
            constants[filters.name] = constants[weight.name].view(*shape_of(weight), 1, 1)
            _replace(graph, node, (image, filters, *node.args[2:]), aten.conv2d.default, images)


def _replace(graph: fx.Graph, node: Node, args: tuple[Any, ...], target: Any, images: dict[fx.Node, fx.Node]) -> None:
    """Replace a node on (N, C) by a call on (N, C, 1, 1), followed by a view of its result."""
    with graph.inserting_before(node):
        made = graph.call_function(target, args, node.kwargs)
        made.meta["val"] = node.meta["val"].view(*shape_of(node), 1, 1)
        viewed = _viewed(graph, made, shape_of(node))
    images[viewed] = made
    node.replace_all_uses_with(viewed)
    graph.erase_node(node)


def _viewed(graph: fx.Graph, node: Node, shape: tuple[int, ...]) -> Node:
    made = graph.call_function(aten.view.default, (node, list(shape)))
    made.meta["val"] = node.meta["val"].reshape(shape)
    return made
