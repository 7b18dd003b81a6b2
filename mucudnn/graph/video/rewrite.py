"""The rewrites of graphs with volumes, and what their operators become."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx

from mucudnn.graph.makers import Builder, Made, Maker
from mucudnn.graph.nodes import Node, described, is_result, shape_of
from mucudnn.graph.operators.operator import VIEWS, Ref, aten
from mucudnn.graph.rewrites.shuffles import join_shuffles
from mucudnn.graph.video.clips import Clips
from mucudnn.graph.video.frames import FrameByFrame, OneFrame, frame_by_frame
from mucudnn.graph.video.layouts import move_views, put_rows_first


def rewrite_volumes(
    graph: fx.Graph, constants: dict[str, Tensor], samples: int, *, puts_rows_first: bool
) -> Mapping[Any, Maker]:
    """Rewrite a graph in place, so that volumes run in bands, and return the makers of what it calls then.

    constants: by name of the node; more are added.
    samples: of volumes, (samples, C, D, H, W).
    puts_rows_first: whether bands have some rows of all frames, instead of some frames.
    """
    if graph.find_nodes(op="call_function", target=aten.conv3d.default):
        Clips(graph, constants).rewrite()
    join_shuffles(graph)
    move_views(graph, constants)
    if puts_rows_first:
        graph.eliminate_dead_code()
        put_rows_first(graph, constants, samples)
    return _MAKERS


def _one_frame(builder: Builder, node: Node) -> Made:
    """Add a view between images and clips of one frame, if what it reads is in rows, and its result is."""
    value, before, after = builder.values[node.args[0]], shape_of(node.args[0]), shape_of(node)
    image, clip = sorted((before, after), key=len)
    dim = next((dim for dim in (2, 3) if clip == (*image[:dim], 1, *image[dim:])), None)
    if dim is None or is_result(node):
        return None
    if not isinstance(value, Ref) or builder.graph.operators[value.index].rows == 0:
        return None
    return builder.add(OneFrame(**described(node), sources=(value.index,), height=before[2], dim=dim))


def _frame_by_frame(builder: Builder, node: Node) -> Made:
    function, *clips = node.args
    sources = builder.images(clips)
    if sources is None or node.meta["val"].dim() == 4:
        return None
    return builder.add(FrameByFrame(**described(node), sources=sources, function=function))


_MAKERS: Mapping[Any, Maker] = MappingProxyType({frame_by_frame: _frame_by_frame, **dict.fromkeys(VIEWS, _one_frame)})
