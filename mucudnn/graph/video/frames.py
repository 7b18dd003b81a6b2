"""Operators that keep the frames of clips apart: views of one frame as an image, and functions of images.

Models view frames as a batch, (N * D, C, H, W), each of these images as a sequence of pixels, and the result as images
again, such as for attention within a frame: operators between such images become one.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from mucudnn.graph.nodes import IDENTITIES, Node, arguments_of, is_pointwise, shape_of
from mucudnn.graph.operators.operator import VIEWS, Band, Operator, aten
from mucudnn.graph.operators.steps import copy_step
from mucudnn.kernels.compiled.library import ProgramStep
from mucudnn.solver.bands import Reach

_ALONG_DIMENSIONS = {
    *(aten.transpose.int, aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.unsqueeze.default),
    *(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.softmax.int),
}
_WITH_SIZES = {aten.permute.default, aten.layer_norm.default}
_OF_MATRICES = {aten.scaled_dot_product_attention.default, aten.bmm.default, aten.matmul.default}
_OF_EACH_SAMPLE = {aten.linear.default, operator.getitem, *IDENTITIES, *VIEWS}


@dataclass(frozen=True, kw_only=True, eq=False)
class OneFrame(Operator):
    """Images of clips of one frame, or such clips of images.

    height: rows of what is read, 1 of clips.
    dim: along which clips have one: 2, or 3 if they are (N, C, H, 1, W).
    """

    height: int
    dim: int = 2

    def reaches(self, dim: int = 0) -> tuple[Reach, ...]:
        if self.dim == 3 or dim > 0:
            return super().reaches(dim)
        first = np.zeros(self.rows, np.int64)
        return (Reach(self.sources[0], first, first + self.height),)

    def _images(self, band: Band) -> tuple[Tensor, Tensor]:
        if band.out.dim() == 5:
            return band.out.select(self.dim, 0), band.xs[0]
        x = band.xs[0].select(self.dim, 0)
        return band.out, x if self.dim == 3 else x[:, :, band.low : band.high]

    def compute(self, band: Band) -> None:
        out, x = self._images(band)
        out.copy_(x)

    def steps(self, band: Band) -> list[ProgramStep]:
        return [copy_step(*self._images(band))]


def frame_by_frame(function: fx.GraphModule, *images: Tensor) -> Tensor:
    """Return what a function makes of images, (N, C, H, W), or of each frame of clips, (N, C, D, H, W)."""
    if images[0].dim() == 4:
        return function(*images)  # type: ignore[no-any-return]
    result: Tensor = function(*(clip.transpose(1, 2).flatten(0, 1) for clip in images))
    return torch.unflatten(result, 0, (len(images[0]), -1)).transpose(1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class FrameByFrame(Operator):
    """``frame_by_frame`` of clips."""

    function: fx.GraphModule
    settings = ("function",)

    def compute(self, band: Band) -> None:
        band.out.copy_(frame_by_frame(self.function, *band.xs))


def join_frames(end: Node, frames: Container[Node], constants: dict[str, Tensor]) -> None:
    """Replace operators that make images of other images by one, which takes any number of these, in place.

    Nothing changes if an operator reads something else, or if its results for a sample may depend on other samples.

    end: the last of the operators.
    frames: images that may be read.
    constants: by name of the node.
    """
    # Which operators are between the images and the end
    inside, images_read, unvisited = {end}, set[Node](), [end]
    while unvisited:
        node = unvisited.pop()
        if node.op != "call_function" or not _keeps_samples_apart(node, shape_of(end)[0], constants):
            return
        images_read.update(operand for operand in node.all_input_nodes if operand in frames)
        results = {node for node in node.all_input_nodes if node not in frames and node.name not in constants}
        unvisited += results - inside
        inside |= results
    if not images_read or any(user not in inside for node in inside - {end} for user in node.users):
        return
    # A graph of copies of them, with the images as its arguments and the constants as its attributes
    graph, copies = fx.Graph(), dict[Node, Node]()
    in_order = [node for node in end.graph.nodes if node in inside]
    for image in dict.fromkeys(operand for node in in_order for operand in node.all_input_nodes):
        if image in images_read:
            copies[image] = graph.placeholder(f"images_{len(copies)}")
    images, attributes = [*copies], dict[str, Tensor]()
    for node in in_order:
        for operand in node.all_input_nodes:
            if operand.name in constants and operand not in copies:
                attributes[operand.name] = constants[operand.name]
                copies[operand] = graph.get_attr(operand.name)
        target, args, kwargs = node.target, *fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        if target in VIEWS:
            target, args, kwargs = aten.reshape.default, (args[0], [-1, *shape_of(node)[1:]]), {}
        copies[node] = graph.call_function(target, args, kwargs)
    graph.output(copies[end])
    # The end calls this graph
    end.target, end.args, end.kwargs = frame_by_frame, (fx.GraphModule(attributes, graph), *images), {}
    for node in reversed(in_order[:-1]):
        end.graph.erase_node(node)


def _keeps_samples_apart(node: Node, samples: int, constants: Container[str]) -> bool:
    """Return whether each result of a node has the samples first, and depends on the same sample of its operands."""
    values = tree_leaves(node.meta.get("val"))
    if not all(isinstance(value, Tensor) and value.shape[:1] == (samples,) for value in values):
        return False
    target, dims = node.target, values[0].dim()
    for operand in node.all_input_nodes:
        shape = shape_of(operand)
        if operand.name in constants:
            if len(shape) >= dims and shape[0] > 1:
                return False
            continue
        if target is not operator.getitem and shape[:1] != (samples,):
            return False
        if (is_pointwise(target) or target in _OF_MATRICES) and len(shape) != dims:
            return False
    if is_pointwise(target) or target in _OF_EACH_SAMPLE:
        return True
    if target not in _OF_MATRICES | _ALONG_DIMENSIONS | _WITH_SIZES:
        return False
    arguments = arguments_of(node)
    if target in _OF_MATRICES:
        return dims > 2 and not arguments.get("dropout_p")
    if target is aten.permute.default:
        return bool(arguments["dims"][0] % dims == 0)
    if target is aten.layer_norm.default:
        return bool(len(arguments["normalized_shape"]) < dims)
    x_dims = len(shape_of(node.args[0])) + (target is aten.unsqueeze.default)
    names = ("dim0", "dim1") if target is aten.transpose.int else ("dim",)
    return all(arguments.get(name, 0) % x_dims for name in names)
