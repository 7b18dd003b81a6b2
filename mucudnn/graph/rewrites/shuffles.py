"""Views that move channels into frames, rows or columns (depth to space) become one operator, which runs in bands.

Models write pixel shuffles in space and time, and frames that come out of channels, as ``view``, ``permute`` and
``stack``; channel shuffles, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from torch import fx

from mucudnn.graph.makers import IDENTITIES, Node, arguments_of, shape_of
from mucudnn.graph.moves import Moves, depth_to_space
from mucudnn.graph.operators import VIEWS, aten


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of the index along a dimension of a tensor: ``size`` numbers that count ``stride`` each."""

    dim: int
    stride: int
    size: int


_Parts: TypeAlias = "list[list[_Part]]"  # of each dimension of a view, the slowest first; none if its size is 1


def join_shuffles(graph: fx.Graph) -> None:
    """Replace chains of views that move channels into later dimensions, or among each other, in place."""
    views: dict[fx.Node, tuple[fx.Node, _Parts]] = {}
    for node in list(graph.nodes):
        found = _view_of(node, views) if node.op == "call_function" else None
        if found is None:
            continue
        views[node] = found
        x, parts = found
        moved = _moved_channels(parts, shape_of(x)) if len(parts) == len(shape_of(x)) else None
        if moved is not None:
            of_rows = prod(size for _, size in moved[1])
            square = (moved[0], ((of_rows, of_rows),), ((1, of_rows),))
            is_pixel_shuffle = moved == square and len(moved[0]) < 2  # which has a step in C++
            call = (aten.pixel_shuffle.default, (x, of_rows)) if is_pixel_shuffle else (depth_to_space, (x, moved))
            with graph.inserting_before(node):
                made = graph.call_function(*call)
            made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)


def _view_of(node: fx.Node, views: dict[fx.Node, tuple[fx.Node, _Parts]]) -> tuple[fx.Node, _Parts] | None:
    """Return a tensor and the parts of its index along each dimension of a node; None if the node is no view."""
    shape = shape_of(node)
    if not prod(shape):
        return None
    if node.target is aten.stack.default:
        return _stacked(node, views)
    x: Any = node.args[0] if node.args else None
    known = _known(x, views)
    if known is None:
        return None
    source, parts = known
    if node.target in VIEWS or node.target is aten.reshape.default:
        regrouped = _regrouped(parts, shape)
        return None if regrouped is None else (source, regrouped)
    if node.target is aten.permute.default:
        return source, [parts[dim] for dim in arguments_of(node)["dims"]]
    if node.target is aten.transpose.int:
        _, first, second = node.args
        swapped = parts[:]
        swapped[first], swapped[second] = parts[second], parts[first]  # type: ignore[index]
        return source, swapped
    if node.target in IDENTITIES and x in views:
        return source, parts
    return None


def _known(x: Any, views: dict[fx.Node, tuple[fx.Node, _Parts]]) -> tuple[fx.Node, _Parts] | None:
    """Return what a node is a view of: of itself, if it may be an image or a volume."""
    if not isinstance(x, fx.Node):
        return None
    shape = shape_of(x)
    if x in views:
        return views[x]
    if len(shape) not in (4, 5):
        return None
    return x, [[_Part(dim, 1, size)] if size > 1 else [] for dim, size in enumerate(shape)]


def _stacked(node: Node, views: dict[fx.Node, tuple[fx.Node, _Parts]]) -> tuple[fx.Node, _Parts] | None:
    """Return the view that a stack of all indices along a dimension, one after another, is."""
    given = arguments_of(node)
    every = given["tensors"]
    if any(one.target is not aten.select.int for one in every):
        return None
    x, dim, _ = every[0].args
    count = shape_of(x)[dim]
    known = _known(x, views)
    if known is None or [one.args for one in every] != [(x, dim, index) for index in range(count)]:
        return None
    source, parts = known
    dim %= len(parts)
    others = [one for index, one in enumerate(parts) if index != dim]
    at = given.get("dim", 0) % len(parts)
    return source, [*others[:at], parts[dim], *others[at:]]


def _regrouped(parts: _Parts, shape: tuple[int, ...]) -> _Parts | None:
    """Return the parts of a view's dimensions in another shape; None if a part cannot be divided between two."""
    left, made = [one for some in parts for one in some][::-1], []
    for size in shape:
        found: list[_Part] = []
        while size > 1:
            one = left.pop()
            if one.size > size and one.size % size == 0:
                inner = one.size // size
                left.append(_Part(one.dim, one.stride, inner))
                one = _Part(one.dim, one.stride * inner, size)
            elif size % one.size:
                return None
            found.append(one)
            size //= one.size
        made.append(found)
    return made


def _moved_channels(parts: _Parts, shape: tuple[int, ...]) -> Moves | None:
    """Return which parts of the channels are in each dimension from 1 on, as strides and sizes.

    None if there is anything else than the dimension itself and channels behind it, or no channel has moved.
    """
    moved = []
    for dim, (some, size) in enumerate(zip(parts, shape, strict=True)):
        joined: list[_Part] = []
        for one in some:
            if joined and (last := joined[-1]).dim == one.dim and last.stride == one.stride * one.size:
                one = _Part(one.dim, one.stride, joined.pop().size * one.size)
            joined.append(one)
        if dim != 1 and size > 1:
            if joined[:1] != [_Part(dim, 1, size)]:
                return None
            joined = joined[1:]
        if any(one.dim != 1 for one in joined) or (dim == 0 and joined):
            return None
        moved.append(tuple((one.stride, one.size) for one in joined))
    of_channels, *others = moved[1:]
    return None if not any(others) and len(of_channels) < 2 else (of_channels, *others)
