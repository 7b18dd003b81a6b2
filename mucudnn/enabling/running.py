"""Functions that torch's dispatcher calls instead of its own kernels: they run the choices of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mucudnn.enabling.calls import DispatchedCall, as_images
from mucudnn.enabling.session import Session
from mucudnn.enabling.status import ShapeStats
from mucudnn.running import operators
from mucudnn.running.choices import Choices
from mucudnn.running.dispatcher import Kernel, untouched
from mucudnn.words.problem import Operation


def forward(session: Session, following: Kernel, x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Any:
    """Compute ``aten::convolution`` with the session's choice, or with torch's kernel if there is none.

    following: torch's kernel. geometry: the arguments from stride to groups.
    """
    if session.background is not None:
        session.background.before_call()
    call = _call(session, x, w, *geometry)
    if call is not None:
        met = call.y = call.y or session.met_as(call.of_result, call, Operation.FORWARD)
        y = _ours(session, met, _result, call, x, w, bias)
        if y is not None:
            return y
        session.make_room(met)
    return following(x, w, bias, *geometry)


def backward(
    session: Session,
    following: Kernel,
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: Sequence[int] | None,
    *geometry_and_mask: Any,
) -> Any:
    """Compute ``aten::convolution_backward``, with torch's own kernel for the gradients that are not tuned.

    geometry_and_mask: the arguments from stride to groups, then the output mask.
    """
    if session.background is not None:
        session.background.before_backward()
    *geometry, (of_x, of_w, of_bias) = geometry_and_mask
    call = _call(session, x, w, *geometry)
    if call is None:
        return following(dy, x, w, bias_sizes, *geometry_and_mask)
    dx = dw = None
    if of_x:
        call.dx = call.dx or session.met_as(call.of_input_gradient, call, Operation.BACKWARD_DATA)
        dx = _ours(session, call.dx, _gradient, call, call.of_input_gradient, dy, x, w)
    if of_w:
        call.dw = call.dw or session.met_as(Operation.BACKWARD_FILTER, call)
        dw = _ours(session, call.dw, _gradient, call, Operation.BACKWARD_FILTER, dy, x, w)
    missing = [of_x and dx is None, of_w and dw is None, of_bias]
    if not (missing[0] or missing[1]):
        return dx, dw, dy.sum((0, *range(2, dy.dim()))) if of_bias else None
    for met in (call.dx if missing[0] else None, call.dw if missing[1] else None):
        session.make_room(met)
    torchs = following(dy, x, w, bias_sizes, *geometry, missing)
    return torchs[0] if missing[0] else dx, torchs[1] if missing[1] else dw, torchs[2]


def _call(
    session: Session,
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> DispatchedCall | None:
    """Look up a call by its shapes, strides and geometry. Returns None if torch's convolution is to run."""
    if session.is_deciding:  # another thread
        session.wait()
    layout = (x.shape, x.stride(), w.shape, w.stride(), x.dtype, x.device, torch.get_num_threads())
    key = (layout, *stride, *padding, *dilation, is_transposed, *output_padding, groups)
    try:
        return session.calls[key]
    except KeyError:
        return session.meet(key, x, w, stride, padding, dilation, is_transposed, output_padding, groups)


def _ours(
    session: Session, met: ShapeStats | None, compute: Callable[..., Tensor | None], *given: Any
) -> Tensor | None:
    """Run the choice for a problem. Returns its result, or None if torch's convolution is to run."""
    if met is None:
        return None
    met.calls += 1
    if met.calls >= met.ask_at:
        session.decide(met)
    if met.choices is None:
        return None
    with untouched:
        result = compute(met.choices, *given)
    met.ours += result is not None
    return result


def _result(choices: Choices, call: DispatchedCall, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor | None:
    if call.is_1d:
        x, w = as_images(x, True), as_images(w, True)
    if call.is_transposed:
        large = torch.empty(
            call.problem.x_shape(call.batch_size), dtype=x.dtype, device=x.device, memory_format=call.y_format
        )  # only its shape is read
        y = operators.computed(Operation.BACKWARD_DATA, large, w, x, call.geometry, choices)
        if y is not None and bias is not None:
            y.add_(bias.view(-1, 1, 1))
    else:
        y = operators.computed(Operation.FORWARD, x, w, bias, call.geometry, choices)
    return y.squeeze(2) if y is not None and call.is_1d else y


def _gradient(
    choices: Choices, call: DispatchedCall, operation: Operation, dy: Tensor, x: Tensor, w: Tensor
) -> Tensor | None:
    if call.is_1d:
        dy, x, w = (as_images(tensor, True) for tensor in (dy, x, w))
    if call.is_transposed:
        x, dy = dy.contiguous(memory_format=call.y_format), x
    third = None if operation is Operation.FORWARD else dy
    gradient = operators.computed(operation, x, w, third, call.geometry, choices)
    return gradient.squeeze(2) if gradient is not None and call.is_1d else gradient
