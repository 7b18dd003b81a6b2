"""Tuned convolutions for eager code: the same results as the module ``operators``, with less overhead per call.

A registered operator with a derivative in Python takes several times as long as the arithmetic of a small convolution.
So for plain tensors, where no subsystem of torch intercepts calls, an ``autograd.Function`` is used, or the plain
computation if no gradient is needed. All other calls go through the registered operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mucudnn.core.problem import Operation
from mucudnn.running import operators
from mucudnn.running.definition import gradients
from mucudnn.running.eager.hot_path import compiled_functions, is_eager


def convolve(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, *rest: Any) -> Tensor:
    """Return the differentiable result of a convolution or gradient; use torch's own if the call is not tuned.

    x: (N, C, H, W), w: (K, C // groups, R, S), third: the bias, (K,) or None, in FORWARD; else dy, (N, K, P, Q). Only
    shape and strides are used of the operand in the result's place, which has no gradient. rest: stride, padding,
    dilation, groups, and ``Choices`` or ``Measured``. Autocast applies to FORWARD, as for torch's own. Raises torch's
    errors for invalid operands, and for ``Measured`` any error.
    """
    if not torch.compiler.is_compiling() and is_eager(x, w, third):
        return convolve_plain(operation, x, w, third, rest)
    *geometry, choices = rest
    return operators.OPERATORS[operation](x, w, third, *geometry, choices.handle)


def convolve_plain(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
    """Return the result of ``convolve``, bypassing torch's dispatcher, for calls for which ``is_eager`` is true."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (third is not None and third.requires_grad)):
        result: Tensor = _APPLY[operation](x, w, third, rest)
        return result
    return _values(operation, x, w, third, rest)


_compiled = compiled_functions(operators.values)
_values: Callable[..., Tensor] = operators.values if _compiled is None else _compiled.values  # without autograd


def _differentiable(name: str, operation: Operation) -> Callable[..., Any]:
    """Return a differentiable function (``autograd.Function``) of an operation. name: its name in torch's profiler."""
    is_forward = operation is Operation.FORWARD

    def forward(ctx: Any, x: Tensor, w: Tensor, third: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
        if is_forward:
            ctx.save_for_backward(x, w)  # without the bias, which may be changed in place before the backward pass
        else:
            ctx.save_for_backward(x, w, third)
        ctx.rest = rest
        return _values(operation, x, w, third, rest)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if is_forward and _compiled is not None and not torch.compiler.is_compiling():
            found: tuple[Tensor | None, ...] = _compiled.gradients(ctx, g)
            if found is not NotImplemented:
                return found
        return *gradients(convolve, operation, ctx, g), None

    # boxed_grads_call: torch looks it up in every call, and an existing attribute is found faster than a missing one
    methods = {"boxed_grads_call": False, "forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), methods)
    # The C function behind ``apply``: without the handling of torch.func, which ``is_eager`` excludes, it takes half
    # the time.
    applied: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return applied


_APPLY = {
    Operation.FORWARD: _differentiable("TunedConv2d", Operation.FORWARD),
    Operation.BACKWARD_DATA: _differentiable("TunedBackwardData", Operation.BACKWARD_DATA),
    Operation.BACKWARD_FILTER: _differentiable("TunedBackwardFilter", Operation.BACKWARD_FILTER),
}
