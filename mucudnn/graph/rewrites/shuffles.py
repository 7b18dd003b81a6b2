"""Views that move channels into frames, rows or columns (depth to space) become one operator, which runs in bands.

Models write pixel shuffles in space and time, and frames that come out of channels, as ``view``, ``permute`` and
``stack``; channel shuffles, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, TypeAlias

from torch import fx

from mucudnn.graph.nodes import IDENTITIES, Node, arguments_of, new_call, shape_of
from mucudnn.graph.operators.moves import Moves, depth_to_space, size_of
from mucudnn.graph.operators.operator import VIEWS, aten


@dataclass(frozen=True, slots=True)
class _Digit:
    """Part of the index along a dimension of a tensor: a number below ``size``, that counts ``stride`` each."""

    dim: int
    stride: int
    size: int


_Digits: TypeAlias = "list[list[_Digit]]"  # of each dimension of a view, the slowest first; none if its size is 1


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a tensor: what its index is, in digits of the tensor's."""

    x: fx.Node
    digits: _Digits


def join_shuffles(graph: fx.Graph) -> None:
    """Replace chains of views that move channels into later dimensions, or among each other, in place."""
    views: dict[fx.Node, _View] = {}
    for node in list(graph.nodes):
        view = _view_of(node, views) if node.op == "call_function" else None
        if view is None:
            continue
        views[node] = view
        moved = _moved_channels(view.digits, shape_of(view.x))
        if moved is None:
            continue
        factor = size_of(moved[1])
        is_square = moved[1:] == (((factor, factor),), ((1, factor),))
        is_pixel_shuffle = is_square and len(moved[0]) < 2  # which has a step in C++
        target, argument = (aten.pixel_shuffle.default, factor) if is_pixel_shuffle else (depth_to_space, moved)
        with graph.inserting_before(node):
            shuffle = new_call(graph, target, (view.x, argument), node.meta["val"])
        node.replace_all_uses_with(shuffle)


def _view_of(node: fx.Node, views: dict[fx.Node, _View]) -> _View | None:
    """Return what a node is as a view of a tensor; None if it is none."""
    shape = shape_of(node)
    if not prod(shape):
        return None
    if node.target is aten.stack.default:
        return _stack(node, views)
    operand: Any = node.args[0] if node.args else None
    view = _viewed(operand, views)
    if view is None:
        return None
    if node.target in VIEWS or node.target is aten.reshape.default:
        digits = _regrouped(view.digits, shape)
        return None if digits is None else _View(view.x, digits)
    if node.target is aten.permute.default:
        return _View(view.x, [view.digits[dim] for dim in arguments_of(node)["dims"]])
    if node.target is aten.transpose.int:
        _, first, second = node.args
        digits = view.digits[:]
        digits[first], digits[second] = digits[second], digits[first]  # type: ignore[index]
        return _View(view.x, digits)
    if node.target in IDENTITIES and operand in views:
        return view
    return None


def _viewed(operand: Any, views: dict[fx.Node, _View]) -> _View | None:
    """Return what an operand is a view of: of itself, if it may be an image or a volume."""
    if not isinstance(operand, fx.Node):
        return None
    shape = shape_of(operand)
    if operand in views:
        return views[operand]
    if len(shape) not in (4, 5):
        return None
    return _View(operand, [[_Digit(dim, 1, size)] if size > 1 else [] for dim, size in enumerate(shape)])


def _stack(node: Node, views: dict[fx.Node, _View]) -> _View | None:
    """Return the view that a stack of all indices along a dimension, one after another, is."""
    arguments = arguments_of(node)
    tensors = arguments["tensors"]
    if any(tensor.target is not aten.select.int for tensor in tensors):
        return None
    operand, dim, _ = tensors[0].args
    count = shape_of(operand)[dim]
    view = _viewed(operand, views)
    if view is None or [tensor.args for tensor in tensors] != [(operand, dim, index) for index in range(count)]:
        return None
    digits = view.digits[:]
    stacked = digits.pop(dim)
    digits.insert(arguments.get("dim", 0) % len(view.digits), stacked)
    return _View(view.x, digits)


def _regrouped(digits: _Digits, shape: tuple[int, ...]) -> _Digits | None:
    """Return the digits of a view's dimensions in another shape; None if one cannot be divided between two."""
    unread = list(chain.from_iterable(digits))[::-1]
    regrouped = []
    for size in shape:
        dimension: list[_Digit] = []
        while size > 1:
            digit = unread.pop()
            if digit.size > size and digit.size % size == 0:
                inner = digit.size // size
                unread.append(_Digit(digit.dim, digit.stride, inner))
                digit = _Digit(digit.dim, digit.stride * inner, size)
            elif size % digit.size:
                return None
            dimension.append(digit)
            size //= digit.size
        regrouped.append(dimension)
    return regrouped


def _moved_channels(digits: _Digits, shape: tuple[int, ...]) -> Moves | None:
    """Return which parts of the channels are in each dimension from 1 on, as strides and sizes.

    None if there is anything else than the dimension itself and channels behind it, or no channel has moved.
    """
    if len(digits) != len(shape):
        return None
    moved = []
    for dim, (dimension, size) in enumerate(zip(digits, shape, strict=True)):
        joined = _joined(dimension)
        if dim != 1 and size > 1:
            if joined[:1] != [_Digit(dim, 1, size)]:
                return None
            joined = joined[1:]
        if any(digit.dim != 1 for digit in joined) or (dim == 0 and joined):
            return None
        moved.append(tuple((digit.stride, digit.size) for digit in joined))
    _, channels, *behind = moved
    return None if not any(behind) and len(channels) < 2 else (channels, *behind)


def _joined(dimension: list[_Digit]) -> list[_Digit]:
    """Return the digits of a dimension, with neighbors as one."""
    joined: list[_Digit] = []
    for digit in dimension:
        if joined and (joined[-1].dim, joined[-1].stride) == (digit.dim, digit.stride * digit.size):
            digit = _Digit(digit.dim, digit.stride, joined.pop().size * digit.size)
        joined.append(digit)
    return joined
