"""Clips of one frame become images.

Frames that are padded or repeated are multiples of one image, so that a convolution of them needs one slice of its
filter, or the sum of some.
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

from mucudnn.graph.nodes import (
    ALONG_CHANNELS,
    CONCATENATIONS,
    IDENTITIES,
    NORM,
    PADS,
    Node,
    arguments_of,
    is_pointwise,
    is_result,
    new_call,
    new_view,
    shape_of,
    sizes,
)
from mucudnn.graph.operators.operator import VIEWS, aten

_MOVES = {
    *(*VIEWS, *IDENTITIES, aten.permute.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default),
}
_OVER_CHANNELS = {
    *(*ALONG_CHANNELS, *CONCATENATIONS),
    *(aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default),
}
_OF_ALL_SIZES = {
    *(aten.group_norm.default, NORM),
    *(aten.type_as.default, aten.to.dtype, aten._to_copy.default),
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

    factors: of each frame, 1 or 0.
    sides: left, right, above, below: zeros around each frame.
    """

    image: fx.Node
    factors: tuple[float, ...] = (1.0,)
    sides: tuple[int, ...] = (0, 0, 0, 0)

    def is_frame(self) -> bool:
        """Return whether the clip is the image as its only frame."""
        return self == _Clip(self.image)


class Clips:
    """The rewrite of the clips of a graph.

    constants: by name of the node; more are added.
    images: nodes (N, C, H, W), by nodes that have the same elements in the same order.
    clips: those that only convolutions read.
    """

    def __init__(self, graph: fx.Graph, constants: dict[str, Tensor]) -> None:
        self.graph, self.constants = graph, constants
        self.images: dict[fx.Node, fx.Node] = {}
        self.clips: dict[fx.Node, _Clip] = {}

    def rewrite(self) -> None:
        """Replace the calls that make clips of one frame by calls that make images."""
        for node in list(self.graph.nodes):
            if node.op != "call_function" or not hasattr(node.target, "_schema") or node.name in self.constants:
                continue
            arguments = arguments_of(node)
            if node.target in _MOVES:
                self._move(node)
            elif len(shape_of(node)) == 5 and (clip := self._clip_of(node, arguments)):
                if clip.is_frame():
                    self.images[node] = clip.image
                else:
                    self.clips[node] = clip
            elif _makes_clips_of_one_frame(node):
                self._replace(node, arguments)

    def _move(self, node: Node) -> None:
        """Note, or replace, a node that has other dimensions of size 1 than an image."""
        x, shape = node.args[0], shape_of(node)
        image, x_shape = self._image(x), shape_of(x)
        if image is None or [size for size in x_shape if size > 1] != [size for size in shape if size > 1]:
            return
        if node.target is aten.permute.default:
            order = [dim % len(x_shape) for dim in node.args[1] if x_shape[dim] > 1]
            if order != sorted(order):
                return
        if shape == shape_of(image) and not is_result(node):
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
                self.images[node] = new_view(self.graph, node, (*shape[:2], *shape[3:]))
        return self.images.get(node)

    def _clip(self, node: Any) -> _Clip | None:
        """Return a node as a clip of frames that are one image or zeros; None if it is none."""
        if node in self.clips:
            return self.clips[node]
        shape, image = shape_of(node), self._image(node)
        is_frame = image is not None and len(shape) == 5 and (*shape[:2], *shape[3:]) == shape_of(image)
        return _Clip(image) if image is not None and is_frame else None

    def _clip_of(self, node: Node, arguments: dict[str, Any]) -> _Clip | None:
        """Return the clip that a node makes by padding, repeating or choosing frames; None for another operator."""
        is_along_frames = arguments.get("dim", 0) in (2, -3)
        if node.target in CONCATENATIONS and is_along_frames:
            return _joined([self._clip(clip) for clip in arguments["tensors"]])
        clip = self._clip(arguments.get("self"))
        if clip is None:
            return None
        if node.target in PADS:
            return self._padded_clip(node, clip, arguments)
        if node.target is aten.slice.Tensor and is_along_frames:
            factors = clip.factors[arguments.get("start") : arguments.get("end") : arguments.get("step", 1)]
            return _Clip(clip.image, factors, clip.sides)
        if node.target is aten.repeat.default:
            *samples_and_channels, frames, rows, columns = arguments["repeats"]
            if [*samples_and_channels, rows, columns] == [1, 1, 1, 1]:
                return _Clip(clip.image, clip.factors * frames, clip.sides)
        return None

    def _padded_clip(self, node: Node, clip: _Clip, arguments: dict[str, Any]) -> _Clip | None:
        """Return the clip that zeros, or copies of the first and the last frame, around another one make."""
        *sides, before, after = (*arguments["pad"], 0, 0, 0, 0)[:6]
        mode = arguments.get("mode", "constant")
        if min(*sides, before, after) < 0:
            return None
        if mode == "constant" and not arguments.get("value"):
            sums = tuple(map(sum, zip(clip.sides, sides, strict=True)))
            return _Clip(clip.image, (0.0,) * before + clip.factors + (0.0,) * after, sums)
        if mode != "replicate" or any(clip.sides):
            return None
        with self.graph.inserting_before(node):
            image = self._padded(clip.image, sides, mode) if any(sides) else clip.image
        return _Clip(image, clip.factors[:1] * before + clip.factors + clip.factors[-1:] * after)

    def _replace(self, node: Node, arguments: dict[str, Any]) -> None:
        """Replace a call that makes clips of one frame by one that makes images, if there is one."""
        value = tree_map_only(Tensor, lambda clip: clip.squeeze(2) if clip.dim() == 5 else clip, node.meta["val"])
        with self.graph.inserting_before(node):
            is_convolution = node.target is aten.conv3d.default
            call = self._convolution(arguments) if is_convolution else self._call(node, arguments)
            if call is None:
                return
            target, args, kwargs = call
            image = new_call(self.graph, target, args, value, kwargs)
        images = {node: image}
        if not shape_of(node):  # several results
            images = {}
            for user in list(node.users):
                with self.graph.inserting_before(user):
                    args = image, user.args[1]
                    images[user] = new_call(self.graph, operator.getitem, args, user.meta["val"].squeeze(2))
        for clip, image in images.items():
            with self.graph.inserting_before(clip):
                viewed = new_view(self.graph, image, shape_of(clip))
            self.images[viewed] = image
            clip.replace_all_uses_with(viewed)

    def _convolution(self, arguments: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return a convolution of one frame as one of images, by the slices of the filter that read the image."""
        clip, weight = self._clip(arguments["input"]), self.constants.get(arguments["weight"].name)
        if clip is None or weight is None:
            return None
        stride, padding, dilation = (
            sizes(arguments.get(name, default), 3) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        # Slices whose frame is the image: their sum is the filter
        frames = [tap * dilation[0] - padding[0] for tap in range(weight.shape[2])]
        taps = [tap for tap, frame in enumerate(frames) if 0 <= frame < len(clip.factors) and clip.factors[frame]]
        if not taps:
            return None
        value = arguments["weight"].meta["val"][:, :, 0]
        filters = new_call(self.graph, aten.select.int, (arguments["weight"], 2, taps[0]), value)
        self.constants[filters.name] = weight[:, :, taps].sum(2, dtype=torch.float64).to(weight.dtype)
        # Zeros around the frames, by the convolution if there are as many on both sides
        image, (left, right, above, below) = clip.image, clip.sides
        rows, columns = padding[1:]
        if left == right and above == below:
            rows, columns = rows + above, columns + left
        else:
            image = self._padded(image, clip.sides, "constant")
        windows = stride[1:], (rows, columns), dilation[1:], arguments.get("groups", 1)
        return aten.conv2d.default, (image, filters, arguments.get("bias"), *windows), {}

    def _padded(self, image: fx.Node, sides: Sequence[int], mode: str) -> fx.Node:
        value = F.pad(image.meta["val"], sides, mode)
        return new_call(self.graph, aten.pad.default, (image, [*sides], mode), value)

    def _call(self, node: Node, arguments: dict[str, Any]) -> tuple[Any, ...] | None:
        """Return a call on clips of one frame as one on images: target, arguments by position and by name."""
        target, args = node.target, list(node.args)
        dims = arguments.get("dim", ())
        if target in _RESIZES:
            target = _RESIZES[target]
            args = [value[1:] if isinstance(value, (list, tuple)) else value for value in args]
        elif target is aten.expand.default:
            args[1] = [*args[1][:2], *args[1][3:]]
        elif target in PADS and not any(args[1][4:]):
            args[1] = args[1][:4]
        elif not (is_pointwise(target) or target in _OF_ALL_SIZES or (target in _OVER_CHANNELS and dims in (1, [1]))):
            return None
        kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
        args, kwargs = tree_map(self._operand, (args, kwargs))
        return (
            None if any(leaf is _NO_OPERAND for leaf in tree_leaves((args, kwargs))) else (target, tuple(args), kwargs)
        )

    def _operand(self, operand: Any) -> Any:
        """Return what a call on images reads in place of an operand of a call on clips of one frame."""
        shape = shape_of(operand)
        if len(shape) < 3:
            return operand
        clip = self._clip(operand)
        if clip is not None:
            return clip.image if clip.is_frame() else _NO_OPERAND
        if shape[-3] != 1:
            return _NO_OPERAND
        viewed = new_view(self.graph, operand, (*shape[:-3], *shape[-2:]))
        if operand.name in self.constants:
            self.constants[viewed.name] = self.constants[operand.name].squeeze(-3)
        return viewed


def _makes_clips_of_one_frame(node: Node) -> bool:
    """Return whether all results of a node that have elements are clips of one frame."""
    leaves = tree_leaves(node.meta.get("val"))
    values = [value for value in leaves if not isinstance(value, Tensor) or value.numel()]
    return bool(values) and all(
        isinstance(value, Tensor) and value.dim() == 5 and value.shape[2] == 1 for value in values
    )


def _joined(clips: Sequence[_Clip | None]) -> _Clip | None:
    """Return clips of the same image, one behind another, as one."""
    first, factors = clips[0], tuple[float, ...]()
    for clip in clips:
        if first is None or clip is None or (clip.image, clip.sides) != (first.image, first.sides):
            return None
        factors += clip.factors
    return None if first is None else _Clip(first.image, factors, first.sides)
