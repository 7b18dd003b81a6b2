"""Operators between images of frames that keep frames apart become one, such as attention within a frame.

Models view frames as a batch, (N * D, C, H, W), each of these images as a sequence of pixels, and the result as images
again.
"""

from __future__ import annotations

import operator
from collections.abc import Container

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from mucudnn.graph.frame_by_frame import frame_by_frame
from mucudnn.graph.makers import IDENTITIES, Node, arguments_of, is_pointwise, shape_of
from mucudnn.graph.operators import VIEWS, aten

_ALONG_DIMENSIONS = {
    *(aten.transpose.int, aten.select.int, aten.slice.Tensor, aten.squeeze.dim, aten.unsqueeze.default),
    *(aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.softmax.int),
}
_WITH_SIZES = {aten.permute.default, aten.layer_norm.default}
_OF_MATRICES = {aten.scaled_dot_product_attention.default, aten.bmm.default, aten.matmul.default}
_OF_EACH_SAMPLE = {aten.linear.default, operator.getitem, *IDENTITIES, *VIEWS}


def join_frames(end: Node, frames: Container[Node], constants: dict[str, Tensor]) -> None:
    """Replace operators that make images of other images by one, which takes any number of these, in place.

    end: the last of the operators. frames: images that may be read. constants: by name of the node. Nothing changes if
    an operator reads something else, or if its results for a sample may depend on other samples.
    """
    inside, read, left = {end}, set[Node](), [end]
    while left:
        node = left.pop()
        if node.op != "call_function" or not _keeps_samples_apart(node, shape_of(end)[0], constants):
            return
        read.update(one for one in node.all_input_nodes if one in frames)
        others = {one for one in node.all_input_nodes if one not in frames and one.name not in constants}
        left += others - inside
        inside |= others
    if not read or any(user not in inside for one in inside - {end} for user in one.users):
        return
    graph, copies = fx.Graph(), dict[Node, Node]()
    used: dict[str, Tensor] = {}
    in_order = [node for node in end.graph.nodes if node in inside]
    for node in in_order:
        for one in node.all_input_nodes:
            if one in read and one not in copies:
                copies[one] = graph.placeholder(f"images_{len(copies)}")
    images = [*copies]
    for node in in_order:
        for one in node.all_input_nodes:
            if one.name in constants and one not in copies:
                used[one.name], copies[one] = constants[one.name], graph.get_attr(one.name)
        target, args, kwargs = node.target, *fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
        if target in VIEWS:
            target, args, kwargs = aten.reshape.default, (args[0], [-1, *shape_of(node)[1:]]), {}
        copies[node] = graph.call_function(target, args, kwargs)
    graph.output(copies[end])
    end.target, end.args, end.kwargs = frame_by_frame, (fx.GraphModule(used, graph), *images), {}
    for node in reversed(in_order[:-1]):
        end.graph.erase_node(node)


def _keeps_samples_apart(node: Node, samples: int, constants: Container[str]) -> bool:
    """Return whether each result of a node has the samples first, and depends on the same sample of its operands."""
    values = tree_leaves(node.meta.get("val"))
    if not all(isinstance(one, Tensor) and one.shape[:1] == (samples,) for one in values):
        return False
    target, dims = node.target, values[0].dim()
    for one in node.all_input_nodes:
        shape = shape_of(one)
        if one.name in constants:
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
    if target in _OF_MATRICES:
        return dims > 2 and not arguments_of(node).get("dropout_p")
    given = arguments_of(node)
    if target is aten.permute.default:
        return bool(given["dims"][0] % dims == 0)
    if target is aten.layer_norm.default:
        return bool(len(given["normalized_shape"]) < dims)
    of_x = len(shape_of(node.args[0])) + (target is aten.unsqueeze.default)
    names = ("dim0", "dim1") if target is aten.transpose.int else ("dim",)
    return all(given.get(name, 0) % of_x for name in names)
