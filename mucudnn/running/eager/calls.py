"""The tuned convolutions as eager code calls them: the values and gradients of ``operators``, for fewer microseconds.

A registered operator with its derivative in Python costs several times what the arithmetic of a small convolution does.
On plain tensors, where nobody watches, calls take a function of autograd made by hand, or none where no gradient is
wanted. All else goes through the registered operators, which torch's subsystems know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mucudnn.running import operators
from mucudnn.running.eager.hot_path import compiled_functions, is_eager
from mucudnn.running.operators import Choices, Measured
from mucudnn.words.problem import Operation, Pair

_FORWARD, _BACKWARD_DATA, _BACKWARD_FILTER = Operation.FORWARD, Operation.BACKWARD_DATA, Operation.BACKWARD_FILTER


def convolve(
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    choices: Choices | Measured,
) -> Tensor:
    """Compute what the operation writes, newly allocated and differentiable; torch's own where nothing is tuned.

    x: (N, C, H, W), w: (K, C // groups, R, S), third: the bias, (K,) or None, in FORWARD; else dy, (N, K, P, Q). Of the
    tensor that is written only shape and strides matter, and it has no gradient. Autocast casts in FORWARD, as torch's
    own. Raises what torch's convolution raises for operands that are none, and for ``Measured`` whatever fails.
    """
    if not torch.compiler.is_compiling() and is_eager(x, w, third):
        return convolve_plain(operation, x, w, third, (stride, padding, dilation, groups, choices))
    return _OPERATORS[operation](x, w, third, stride, padding, dilation, groups, choices.handle)


def convolve_plain(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
    """Compute what ``convolve`` does for operands and circumstances that are ``is_eager``.

    rest: stride, padding, dilation, groups and choices.
    """
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (third is not None and third.requires_grad)):
        result: Tensor = _APPLY[operation](x, w, third, rest)
        return result
    return _values(operation, x, w, third, rest)


_compiled = compiled_functions(operators.values)


def _values_of_rest(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
    return operators.values(operation, x, w, third, *rest)


# Computes without autograd. Takes operation, x, w, third, and the rest of ``convolve_plain``.
_values: Callable[..., Tensor] = _values_of_rest if _compiled is None else _compiled.values


class TunedConv2d(torch.autograd.Function):
    """Differentiates FORWARD. Its name, as those of the others, is what torch's profiler shows."""

    boxed_grads_call = False  # torch asks for it in every call: what is there is found sooner than what is not

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, w)  # not the bias, which may be changed in place before the backward pass
        ctx.rest = rest
        return _values(_FORWARD, x, w, bias, rest)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if _compiled is not None and not torch.compiler.is_compiling():
            gradients: tuple[Tensor | None, ...] = _compiled.gradients(ctx, dy)
            if gradients is not NotImplemented:
                return gradients
        x, w = ctx.saved_tensors
        of_x, of_w, of_bias, _ = ctx.needs_input_grad
        dx = convolve(_BACKWARD_DATA, x, w, dy, *ctx.rest) if of_x else None
        dw = convolve(_BACKWARD_FILTER, x, w, dy, *ctx.rest) if of_w else None
        return dx, dw, operators.bias_gradient(dy) if of_bias else None, None


class TunedBackwardData(torch.autograd.Function):
    """Differentiates dx by w and dy. x has no gradient: it lends its shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, dy: Tensor, rest: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, w, dy)
        ctx.rest = rest
        return _values(_BACKWARD_DATA, x, w, dy, rest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Take g, (N, C, H, W), the gradient of dx."""
        _, w, dy = ctx.saved_tensors
        _, of_w, of_dy, _ = ctx.needs_input_grad
        dw = convolve(_BACKWARD_FILTER, g, w, dy, *ctx.rest) if of_w else None
        return None, dw, convolve(_FORWARD, g, w, None, *ctx.rest) if of_dy else None, None


class TunedBackwardFilter(torch.autograd.Function):
    """Differentiates dw by x and dy. w has no gradient: it lends its shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, dy: Tensor, rest: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x, w, dy)
        ctx.rest = rest
        return _values(_BACKWARD_FILTER, x, w, dy, rest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Take g, (K, C // groups, R, S), the gradient of dw."""
        x, _, dy = ctx.saved_tensors
        of_x, _, of_dy, _ = ctx.needs_input_grad
        dx = convolve(_BACKWARD_DATA, x, g, dy, *ctx.rest) if of_x else None
        return dx, None, convolve(_FORWARD, x, g, None, *ctx.rest) if of_dy else None, None


def _apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Take the function of C behind ``apply``, which is half of its time: the rest is for the transforms of torch.func.

    These see none of our calls (``nobody_watches``).
    """
    applied: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return applied


_APPLY = {
    _FORWARD: _apply(TunedConv2d),
    _BACKWARD_DATA: _apply(TunedBackwardData),
    _BACKWARD_FILTER: _apply(TunedBackwardFilter),
}
_OPERATORS = {
    _FORWARD: operators.conv2d,
    _BACKWARD_DATA: operators.conv2d_backward_data,
    _BACKWARD_FILTER: operators.conv2d_backward_filter,
}
