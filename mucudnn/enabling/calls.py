"""Calls of torch's convolutions, described as problems and computed with the choices of a session.

``forward`` and ``backward`` are called by torch's dispatcher instead of its own kernels. A 1-D convolution is treated
as one of images of height 1. A transposed convolution is the backward data of another convolution: its input is that
convolution's dy, and its result the dx. So the dx of the transposed convolution is a forward convolution, and its dw is
the backward filter with x and dy exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.enabling.status import ShapeStats
from mucudnn.kernels.memory import TORCH_FORMATS
from mucudnn.running import operators
from mucudnn.running.choices import Choices
from mucudnn.running.dispatcher import Kernel, untouched
from mucudnn.running.problems import problem_of_call

if TYPE_CHECKING:
    from mucudnn.enabling.session import Session


@dataclass(slots=True, eq=False)
class DispatchedCall:
    """Shapes of a call of torch's convolution, and statistics of its problems: the result and both gradients.

    problem: the FORWARD problem of the convolution; a transposed call runs its backward data. is_1d: whether the
    tensors have no height. y, dx, dw: statistics of the result and both gradients; None until first needed, and for
    operations that the config excludes.
    """

    problem: ConvProblem
    batch_size: int
    device: torch.device
    is_1d: bool
    is_transposed: bool
    y: ShapeStats | None = None
    dx: ShapeStats | None = None
    dw: ShapeStats | None = None

    @property
    def of_result(self) -> Operation:
        """The operation that computes y, the call's result: forward, for a transposed call backward data."""
        return Operation.BACKWARD_DATA if self.is_transposed else Operation.FORWARD

    @property
    def of_input_gradient(self) -> Operation:
        """The operation that computes dx, the gradient of the input: backward data, for a transposed call forward."""
        return Operation.FORWARD if self.is_transposed else Operation.BACKWARD_DATA


def call_of(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> DispatchedCall | None:
    """Return a description of a call of ``aten::convolution``; None for calls that are never tuned.

    Never tuned are 3-D calls, calls with unsupported dtypes or no samples, and invalid calls, which torch rejects. x:
    (N, C, H, W) or (N, C, W), w: (K, C // groups, R, S) or (K, C // groups, S), if transposed (C, K // groups, R, S).
    """
    problem = problem_of_call(
        *(x, w, stride, padding, dilation, groups), is_transposed=is_transposed, output_padding=output_padding
    )
    if problem is None:
        return None
    return DispatchedCall(problem.with_operation(Operation.FORWARD), len(x), x.device, x.dim() == 3, is_transposed)


def as_images(tensor: Tensor, is_1d: bool) -> Tensor:
    """Return a 1-D tensor as images of height 1 if ``is_1d``, made contiguous as torch does, else the tensor itself."""
    return tensor.contiguous().unsqueeze(2) if is_1d and tensor.dim() == 3 else tensor


# Replacements of torch's kernels


def forward(session: Session, following: Kernel, x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any) -> Any:
    """Return the result of ``aten::convolution`` by the session's choice, or by torch's kernel if there is none.

    following: torch's kernel. geometry: the arguments from stride to groups.
    """
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
    """Return the result of ``aten::convolution_backward``, with torch's own kernel for gradients that are not tuned.

    geometry_and_mask: the arguments from stride to groups, then the output mask.
    """
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
    """Look up a call by its shapes, strides and geometry; return None if torch's convolution is to run."""
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
    """Return the result of the choice for a problem; None if torch's convolution is to run."""
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
    if not call.is_transposed:
        return _computed(choices, call, Operation.FORWARD, x, w, bias)
    shape, torch_format = call.problem.x_shape(call.batch_size), TORCH_FORMATS[call.problem.memory_format]
    large = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch_format)  # only its shape is read
    y = _computed(choices, call, Operation.BACKWARD_DATA, large, w, as_images(x, call.is_1d))
    if y is not None and bias is not None:
        y.add_(bias.view(-1, *[1] * (y.dim() - 2)))
    return y


def _gradient(
    choices: Choices, call: DispatchedCall, operation: Operation, dy: Tensor, x: Tensor, w: Tensor
) -> Tensor | None:
    if call.is_transposed:
        dy, x = x, as_images(dy, call.is_1d).contiguous(memory_format=TORCH_FORMATS[call.problem.memory_format])
    third = None if operation is Operation.FORWARD else as_images(dy, call.is_1d)
    return _computed(choices, call, operation, x, w, third)


def _computed(
    choices: Choices, call: DispatchedCall, operation: Operation, x: Tensor, w: Tensor, third: Tensor | None
) -> Tensor | None:
    """Return the result of an operation of the problem; None if torch's convolution is to run. third: bias or dy."""
    p = call.problem
    geometry = p.stride, p.padding, p.dilation, p.groups
    x, w = as_images(x, call.is_1d), as_images(w, call.is_1d)
    result = operators.computed(operation, x, w, third, geometry, choices)
    return result.squeeze(2) if result is not None and call.is_1d else result
