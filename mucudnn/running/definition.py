"""Definition of convolution operators for torch, with autograd, autocast, fake kernels and FLOP counts.

A convolution has three operators on the same tensors x, w and y (or dy): forward and the two gradients. Each operator's
derivatives are the other two, so that gradients of any order need no more. The operators have no forward-mode
derivatives and no rules for ``torch.func``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, register_flop_formula

from mucudnn.core.problem import Operation
from mucudnn.kernels.torch_convolution import torch_convolution

Compute = Callable[..., Tensor]  # arguments: operation, x, w, bias or dy, the other arguments of a call


def define(
    schema: str,
    compute: Callable[..., Tensor],
    *,
    fake: Callable[..., Tensor],
    save: Callable[..., None],
    gradients: Callable[..., Any],
    flops: Callable[..., int],
    is_cast: bool = True,
) -> OpOverload[..., Tensor]:
    """Define an operator of the namespace ``mucudnn``.

    fake: computes the result's shape and strides. save: sets up the context for ``gradients``. flops: counts FLOPs by
    torch's formula. is_cast: whether autocast casts the operands, as for torch's convolution.
    """
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mucudnn::{name}", fake, lib=_library)
    torch.library.register_autograd(f"mucudnn::{name}", gradients, setup_context=save, lib=_library)
    operator = getattr(torch.ops.mucudnn, name)
    register_flop_formula(operator, get_raw=True)(flops)
    overload: OpOverload[..., Tensor] = operator.default
    for device_type in ("cpu", "cuda") if is_cast else ():
        _library.impl(name, _cast_and_compute(overload, device_type), f"Autocast{device_type.upper()}")
    return overload


def define_convolution(compute: Compute) -> dict[Operation, OpOverload[..., Tensor]]:
    """Define the operators ``conv2d``, ``conv2d_backward_data`` and ``conv2d_backward_filter``, and return them.

    The operators take x, w, the bias or dy, stride, padding, dilation, groups and ``tuning``, a number that selects the
    code to run. compute: function of the operation and the operator's arguments.
    """
    sizes = ", ".join(f"SymInt[2] {each}" for each in ("stride", "padding", "dilation"))
    operators: dict[Operation, OpOverload[..., Tensor]] = {}

    def call(operation: Operation, *arguments: Any) -> Tensor:
        return operators[operation](*arguments)

    for operation in Operation:
        is_forward = operation is Operation.FORWARD
        suffix = "" if is_forward else f"_{operation.name.lower()}"
        third = "Tensor? bias" if is_forward else "Tensor dy"
        operators[operation] = define(
            f"conv2d{suffix}(Tensor x, Tensor w, {third}, {sizes}, SymInt groups, int tuning) -> Tensor",
            partial(compute, operation),
            fake=partial(_undivided, operation),
            save=_save_without_bias if is_forward else _save_all,
            gradients=partial(_gradients, call, operation),
            flops=partial(_flops, operation),
            is_cast=is_forward,
        )
    return operators


def gradients(compute: Compute, operation: Operation, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Return an operation's gradients by x, w, and the bias or dy; None for those not in ``ctx.needs_input_grad``.

    g: the gradient of the tensor that the operation wrote, which g replaces in the other two operations. The operand in
    that tensor's place has no gradient, since only its shape was used.
    """
    x, w, y = (*ctx.saved_tensors, g)[:3]
    if operation is Operation.BACKWARD_DATA:
        x = g
    elif operation is Operation.BACKWARD_FILTER:
        w = g
    of_x, of_w, of_third = ctx.needs_input_grad[:3]
    dx = dw = of_y = None
    if of_x and operation is not Operation.BACKWARD_DATA:
        dx = compute(Operation.BACKWARD_DATA, x, w, y, *ctx.rest)
    if of_w and operation is not Operation.BACKWARD_FILTER:
        dw = compute(Operation.BACKWARD_FILTER, x, w, y, *ctx.rest)
    if of_third:
        is_bias = operation is Operation.FORWARD
        of_y = bias_gradient(g) if is_bias else compute(Operation.FORWARD, x, w, None, *ctx.rest)
    return dx, dw, of_y


def bias_gradient(dy: Tensor) -> Tensor:
    """Return the gradient of the bias, (K,): the sum of dy, (N, K, ...).

    Callers must look this function up by name, since ``in_place`` replaces it during a recording.
    """
    return dy.sum((0, *range(2, dy.dim())))


def convolution_flops(x: Tensor, w: Tensor, bias: Tensor | None, *geometry: Any, out_val: Tensor) -> int:
    """Return the FLOPs of a convolution, by torch's formula for ``aten::convolution``.

    geometry: includes ``transposed`` and ``output_padding``.
    """
    counted: int = flop_registry[torch.ops.aten.convolution](x, w, bias, *geometry, out_val=out_val)
    return counted


def _undivided(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, *geometry_and_tuning: Any) -> Tensor:
    stride, padding, dilation, groups, _ = geometry_and_tuning
    return torch_convolution(operation, x, w, third, (stride, padding, dilation, groups))


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, dy, *ctx.rest = inputs
    ctx.save_for_backward(x, w, dy)


def _save_without_bias(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, *ctx.rest = inputs
    ctx.save_for_backward(x, w)  # without the bias, which may be changed in place before the backward pass


def _gradients(compute: Compute, operation: Operation, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    return *gradients(compute, operation, ctx, g), *(None for _ in ctx.rest)


def _flops(
    operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, *geometry_and_tuning: Any, out_val: Tensor
) -> int:
    stride, padding, dilation, groups, _ = geometry_and_tuning
    geometry = stride, padding, dilation, False, (0,) * len(stride), groups
    if operation is Operation.FORWARD:
        return convolution_flops(x, w, third, *geometry, out_val=out_val)
    of_data = operation is Operation.BACKWARD_DATA
    arguments = third, x, w, None, *geometry, (of_data, not of_data, False)
    formula = flop_registry[torch.ops.aten.convolution_backward]
    counted: int = formula(*arguments, out_val=(out_val, out_val, None))
    return counted


def _cast_and_compute(operator: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """Return the autocast kernel, which casts all but float64 to autocast's dtype, as for torch's convolution."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

    def cast_and_compute(*args: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*(_cast(a, device_type, dtype) for a in args))

    return cast_and_compute


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    eligible = isinstance(value, Tensor) and value.is_floating_point() and value.device.type == device_type
    return value.to(dtype) if eligible and value.dtype != torch.float64 else value


_library: Any = torch.library.Library("mucudnn", "DEF")  # type: ignore[no-untyped-call]
