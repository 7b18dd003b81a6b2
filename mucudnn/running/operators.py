"""Tuned convolutions: the way of a call from a module to the executable of its configuration.

``convolve`` is differentiable. It calls ``values``, which runs the executable that was chosen for the call, or torch's
own convolution if there is none (other shape, larger batch, other dtype) or if it cannot run.

A convolution has three operations on the same tensors x, w and y (or dy): forward and the two gradients. Each one's
derivatives are the other two, so that gradients of any order need no more. Calls on which no subsystem of torch has to
act take an ``autograd.Function``, or no function of torch at all if no gradient is needed: a registered operator with a
derivative in Python takes several times as long as the arithmetic of a small convolution. All other calls take the
registered operators ``mucudnn::conv2d``, ``conv2d_backward_data`` and ``conv2d_backward_filter``, which have autograd,
autocast, fake kernels and FLOP counts, but no forward-mode derivatives and no rules for ``torch.func``. They look the
configuration up by the integer ``tuning``, the handle of a ``Choices``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, register_flop_formula

from mucudnn.core.errors import InvalidInputError, MisalignedError, UnavailableError, raise_interruption, say_once
from mucudnn.core.problem import MemoryFormat, Operation
from mucudnn.kernels.algorithm import Prologue, zero_moments
from mucudnn.kernels.memory import format_of, is_out_of_memory
from mucudnn.kernels.torch_convolution import Geometry, functions, torch_convolution
from mucudnn.running.choices import Choices, choices_of, executable_of, normalizing_executable_of, note_failure
from mucudnn.running.devices import made_current
from mucudnn.running.dispatcher import untouched
from mucudnn.running.eager.hot_path import extension, is_eager, run_known
from mucudnn.running.executable import Executable, StepError
from mucudnn.running.groups import Group, c_apply, group_of, remember_moments
from mucudnn.running.pending import Pending
from mucudnn.running.problems import is_backward_data, torchs_memory_format, transposed_shape
from mucudnn.running.workspace import make_room, note_lack_of_memory

_INSTEAD = "torch's own convolution runs instead"


observer: Any = None  # an ``InPlaceTimes`` while the convolutions in a model's steps are timed


# Without autograd


def computed(
    operation: Operation,
    x: Tensor,
    w: Tensor,
    third: Tensor | None,
    geometry: Geometry,
    choices: Choices,
    prologue: Prologue | None = None,
) -> Tensor | None:
    """Return the result of a call's tuned configuration; None if the call is not tuned or the configuration cannot run.

    x: (N, C, H, W).
    w: (K, C // groups, R, S).
    third: the bias, (K,) or None, in FORWARD; else dy, (N, K, P, Q).
    prologue: what is computed of x; None is returned if the configuration cannot do that.

    Only shape and strides are used of the operand in the result's place. Autograd does not record this function: call
    it with gradients disabled, or below autograd. A step may be torch's own convolution of a micro-batch.

    If a step fails, torch's own convolution computes this and all further calls; failures are recorded.
    """
    if observer is not None and not observer.is_inside:
        observed: Tensor | None = observer.record(
            computed, (operation, x, w, third, geometry, choices, prologue), (operation,), x, w, *geometry
        )
        return observed
    executable, with_moments = None, choices.computes_moments and operation is Operation.FORWARD
    while True:
        try:
            if not with_moments and prologue is None:
                result: Tensor | None = run_known(choices.executables, operation, x, w, third, *geometry)
                if result is not NotImplemented:
                    return result
            find = executable_of if prologue is None else normalizing_executable_of
            executable = find(choices, operation, x, w, third, geometry)
            if executable is not None and with_moments and executable.fuses_moments:
                return _run_with_moments(executable, x, w, third, prologue)
            if executable is None or prologue is None:
                return None if executable is None else _run(executable, x, w, third)
            return executable.run(x, w, third, None, prologue)
        except MisalignedError:
            return None
        except StepError as error:
            if error.is_lack_of_memory:
                say_once(f"{error.problem}: {error}; {_INSTEAD}")
                return None
            note_failure(error, x.device)
            for key, cached in list(choices.executables.items()):
                if cached is executable:
                    choices.executables.pop(key, None)
        except (RuntimeError, MemoryError) as error:
            raise_interruption(error)
            if not is_out_of_memory(error):
                raise
            tuned_for = f"{operation}, x {tuple(x.shape)}, w {tuple(w.shape)}"
            note_lack_of_memory(f"no memory for what was tuned for {tuned_for}; {_INSTEAD}", x.device)
            return None
        except UnavailableError as error:
            say_once(f"{error}; {_INSTEAD}")
            return None


def values(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, settings: tuple[Any, ...]) -> Tensor:
    """Return the result of a call by its tuned configuration (``computed``), or by torch's own as the fallback.

    While a configuration is being measured there is no fallback: any error is raised.

    settings: stride, padding, dilation, groups, and ``Choices`` or None.
    """
    geometry, choices = settings[:4], settings[4]
    if choices is None:
        return torch_convolution(operation, x, w, third, geometry)
    if choices.measured is not None:
        y = run_known(choices.executables, operation, x, w, third, *geometry)
        if isinstance(y, Tensor):
            return y
        executable = executable_of(choices, operation, x, w, third, geometry)
        if executable is None:
            raise InvalidInputError(
                f"what is measured does not fit {operation}, x {tuple(x.shape)}, w {tuple(w.shape)}"
            )
        return _run(executable, x, w, third)
    result = computed(operation, x, w, third, geometry, choices)
    if result is not None:
        return result
    if choices.beside_torchs:
        make_room(choices.beside_torchs.get(operation, inf))
    return torch_convolution(operation, x, w, third, geometry)


def _run(executable: Executable, x: Tensor, w: Tensor, third: Tensor | None) -> Tensor:
    if executable.bound is not None:
        return executable.bound(x, w, third)
    with untouched, made_current(x.device):  # a step may be torch's own convolution
        return executable.run(x, w, third)


def _run_with_moments(
    executable: Executable, x: Tensor, w: Tensor, bias: Tensor | None, prologue: Prologue | None
) -> Tensor:
    moments = zero_moments(w.shape[0])
    y = executable.run(x, w, bias, moments, prologue)
    remember_moments(y, moments)
    return y


if extension is not None:
    extension.set_values_in_python(values)
_values: Callable[..., Tensor] = values if extension is None else extension.values


# With autograd


def _values_for(settings: tuple[Any, ...]) -> Callable[..., Tensor]:
    """Return the function that computes a call: the one in C++, unless something has to be seen in Python."""
    choices = settings[-1]
    return values if observer is not None or choices is None or choices.computes_moments else _values


def convolve(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, *settings: Any) -> Tensor:
    """Return the differentiable result of a convolution or gradient; use torch's own if the call is not tuned.

    Only shape and strides are used of the operand in the result's place, which has no gradient. Autocast applies to
    FORWARD, as for torch's own.

    x: (N, C, H, W).
    w: (K, C // groups, R, S).
    third: the bias, (K,) or None, in FORWARD; else dy, (N, K, P, Q).
    settings: stride, padding, dilation, groups, and ``Choices``.

    Raises torch's errors for invalid operands, and any error of a configuration that is being measured.
    """
    *geometry, choices = settings
    is_plain = not torch.compiler.is_compiling() and is_eager(x, w, third)
    if is_plain or choices.measured is not None:  # what is measured has no handle
        return convolve_plain(operation, x, w, third, settings)
    return OPERATORS[operation](x, w, third, *geometry, choices.handle)


def convolve_plain(
    operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, settings: tuple[Any, ...]
) -> Tensor:
    """Return the result of ``convolve``, bypassing torch's dispatcher, for calls for which ``is_eager`` is true."""
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (third is not None and third.requires_grad)):
        group = group_of(x) if operation is Operation.FORWARD else None
        if group is not None:
            on_group: Tensor = _apply_on_group(x, w, third, settings, group)
            return on_group
        result: Tensor = _APPLY[operation](x, w, third, settings)
        return result
    return (_values if observer is None and settings[-1] is not None else values)(operation, x, w, third, settings)


def convolve_group(x: Tensor, w: Tensor, bias: Tensor | None, settings: tuple[Any, ...], group: Group) -> Tensor | None:
    """Return the convolution of a pending tensor, which a group computes; None if it is to be computed before."""
    *geometry, choices = settings
    known = choices, Operation.FORWARD, group.normalized.x, w, bias, tuple(geometry)
    if not torch.is_grad_enabled() or group.prologue() is None or normalizing_executable_of(*known) is None:
        return None
    y: Tensor = _apply_on_group(x, w, bias, settings, group)
    return y


def _gradients(
    compute: Callable[..., Tensor], operation: Operation, ctx: Any, g: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return an operation's gradients by x, w, and the bias or dy; None for those not in ``ctx.needs_input_grad``.

    The operand in the result's place has no gradient, since only its shape was used.

    compute: computes an operation.
    g: the gradient of the tensor that the operation wrote, which g replaces in the other two operations.
    """
    x, w, y = (*ctx.saved_tensors, g)[:3]
    if operation is Operation.BACKWARD_DATA:
        x = g
    elif operation is Operation.BACKWARD_FILTER:
        w = g
    needs_dx, needs_dw, needs_third = ctx.needs_input_grad[:3]
    dx = dw = third_gradient = None
    if needs_dx and operation is not Operation.BACKWARD_DATA:
        dx = compute(Operation.BACKWARD_DATA, x, w, y, *ctx.rest)
    if needs_dw and operation is not Operation.BACKWARD_FILTER:
        dw = compute(Operation.BACKWARD_FILTER, x, w, y, *ctx.rest)
    if needs_third:
        is_bias = operation is Operation.FORWARD
        third_gradient = bias_gradient(g) if is_bias else compute(Operation.FORWARD, x, w, None, *ctx.rest)
    return dx, dw, third_gradient


def bias_gradient(dy: Tensor) -> Tensor:
    """Return the gradient of the bias, (K,): the sum of dy, (N, K, ...)."""
    if observer is not None and not observer.is_inside:
        observed: Tensor = observer.record_more(bias_gradient, dy)
        return observed
    return dy.sum((0, *range(2, dy.dim())))


def _differentiable(name: str, operation: Operation) -> Callable[..., Any]:
    """Return a differentiable function (``autograd.Function``) of an operation.

    name: its name in torch's profiler.
    """
    is_forward = operation is Operation.FORWARD

    def forward(ctx: Any, x: Tensor, w: Tensor, third: Tensor | None, settings: tuple[Any, ...]) -> Tensor:
        if is_forward:
            ctx.save_for_backward(x, w)  # without the bias, which may be changed in place before the backward pass
        else:
            ctx.save_for_backward(x, w, third)
        ctx.rest = settings
        return _values_for(settings)(operation, x, w, third, settings)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        may_run = is_forward and observer is None and _compiled is not None and g.dim() == 4
        if may_run and not torch.compiler.is_compiling() and not torch.is_grad_enabled():  # which unpacks what is saved
            gradients: tuple[Tensor | None, ...] = _compiled.gradients(ctx, g)
            if gradients is not NotImplemented:
                return gradients
        return *_gradients(convolve, operation, ctx, g), None

    # boxed_grads_call: torch looks it up in every call, and an existing attribute is found faster than a missing one
    methods = {"boxed_grads_call": False, "forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (torch.autograd.Function,), methods)
    # The C function behind ``apply``: without the handling of torch.func, which ``is_eager`` excludes, it takes half
    # the time.
    applied: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return applied


_compiled = extension  # None to compute each gradient separately
_APPLY = {
    Operation.FORWARD: _differentiable("TunedConv2d", Operation.FORWARD),
    Operation.BACKWARD_DATA: _differentiable("TunedBackwardData", Operation.BACKWARD_DATA),
    Operation.BACKWARD_FILTER: _differentiable("TunedBackwardFilter", Operation.BACKWARD_FILTER),
}


class _OnGroup(torch.autograd.Function):
    """A convolution of the result of a group, which does not keep that result, but has it computed again for dw."""

    boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, settings: tuple[Any, ...], group: Group) -> Tensor:
        ctx.save_for_backward(w, *group.tensors())
        ctx.norms, ctx.rest = group.norms(), settings
        if isinstance(x, Pending):
            *geometry, choices = settings
            of_x = Operation.FORWARD, group.normalized.x, w, bias
            y = computed(*of_x, tuple(geometry), choices, group.prologue())
            if y is not None:
                return y
            x = group.computed()
        return _values_for(settings)(Operation.FORWARD, x, w, bias, settings)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        w, x, *others = ctx.saved_tensors
        needs_dx, needs_dw, needs_bias = ctx.needs_input_grad[:3]
        *geometry, choices = ctx.rest
        y, dw = x, None  # of which dx only needs the shape
        if needs_dw:
            group = Group.of(ctx.norms, iter((x, *others)))
            if choices is not None and choices.normalizes and not torch.is_grad_enabled() and is_eager(x, w, g):
                prologue = group.prologue()
                if prologue is not None:
                    dw = computed(Operation.BACKWARD_FILTER, x, w, g, tuple(geometry), choices, prologue)
            if dw is None:
                y = group.computed()
        if choices is None:
            stride, padding, dilation, groups = geometry
            mask, sizes = (needs_dx, needs_dw, needs_bias), [w.shape[0]] if needs_bias else None
            none = (0,) * len(stride)
            gradients = torch.ops.aten.convolution_backward(
                g, y, w, sizes, stride, padding, dilation, False, none, groups, mask
            )
            return *gradients, None, None
        if observer is None and _compiled is not None and g.dim() == 4:
            needed = needs_dx, needs_dw and dw is None, needs_bias, False
            known = _compiled.gradients_of((y, w), needed, ctx.rest, g)
            if known is not NotImplemented:
                dx, other_dw, bias_gradients, _ = known
                return dx, other_dw if dw is None else dw, bias_gradients, None, None
        dx = convolve(Operation.BACKWARD_DATA, y, w, g, *ctx.rest) if needs_dx else None
        if needs_dw and dw is None:
            dw = convolve(Operation.BACKWARD_FILTER, y, w, g, *ctx.rest)
        return dx, dw, bias_gradient(g) if needs_bias else None, None, None


_apply_on_group = c_apply(_OnGroup)


# Registered operators

_library: Any = torch.library.Library("mucudnn", "DEF")  # type: ignore[no-untyped-call]


def _define(
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

    fake: computes the result's shape and strides.
    save: sets up the context for ``gradients``.
    flops: counts FLOPs by torch's formula.
    is_cast: whether autocast casts the operands, as for torch's convolution.
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


def _cast_and_compute(operator: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    """Return the autocast kernel, which casts all but float64 to autocast's dtype, as for torch's convolution."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

    def cast(value: Any, dtype: torch.dtype) -> Any:
        eligible = isinstance(value, Tensor) and value.is_floating_point() and value.device.type == device_type
        return value.to(dtype) if eligible and value.dtype != torch.float64 else value

    def cast_and_compute(*args: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*(cast(a, dtype) for a in args))

    return cast_and_compute


def _convolution(operation: Operation) -> OpOverload[..., Tensor]:
    """Define an operation's operator: on x, w, the bias or dy, stride, padding, dilation, groups, and ``tuning``."""
    is_forward = operation is Operation.FORWARD
    suffix = "" if is_forward else f"_{operation.name.lower()}"
    third = "Tensor? bias" if is_forward else "Tensor dy"
    sizes = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"

    def compute(x: Tensor, w: Tensor, third: Tensor | None, *settings: Any) -> Tensor:
        *geometry, tuning = settings
        return values(operation, x, w, third, (*geometry, choices_of(tuning)))

    def fake(x: Tensor, w: Tensor, third: Tensor | None, *settings: Any) -> Tensor:
        return torch_convolution(operation, x, w, third, settings[:4])

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, third, *ctx.rest = inputs  # without the bias, which may be changed in place before the backward pass
        ctx.save_for_backward(*((x, w) if is_forward else (x, w, third)))

    def gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        operands = _gradients(lambda operation, *call: OPERATORS[operation](*call), operation, ctx, g)
        return *operands, *(None for _ in ctx.rest)

    def flops(x: Tensor, w: Tensor, third: Tensor | None, *settings: Any, out_val: Tensor) -> int:
        stride, padding, dilation, groups, _ = settings
        geometry = stride, padding, dilation, False, (0,) * len(stride), groups
        if is_forward:
            return _forward_flops(x, w, third, *geometry, out_val=out_val)
        is_dx = operation is Operation.BACKWARD_DATA
        formula = flop_registry[torch.ops.aten.convolution_backward]
        mask, written = (is_dx, not is_dx, False), (out_val, out_val, None)
        counted: int = formula(third, x, w, None, *geometry, mask, out_val=written)
        return counted

    schema = f"conv2d{suffix}(Tensor x, Tensor w, {third}, {sizes}, int tuning) -> Tensor"
    return _define(schema, compute, fake=fake, save=save, gradients=gradients, flops=flops, is_cast=is_forward)


def _forward_flops(*call: Any, out_val: Tensor) -> int:
    """Return the FLOPs of a call of ``aten::convolution``, by torch's formula."""
    counted: int = flop_registry[torch.ops.aten.convolution](*call, out_val=out_val)
    return counted


OPERATORS = {operation: _convolution(operation) for operation in Operation}
conv2d = OPERATORS[Operation.FORWARD]


# The transposed convolution is the backward data of another convolution: its input is that convolution's dy, its result
# the dx. So the dx of the transposed convolution is a forward convolution, and its dw is the backward filter with x and
# dy exchanged. The tuned problem is the other convolution's, whose x is the result.


def transposed_values(x: Tensor, w: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Return a transposed convolution by the tuned choice, or by torch's convolution. Autograd does not record it.

    x: (N, K, P, Q), of volumes with a depth, as w.
    w: (K, C // groups, R, S).
    settings: stride, padding, output padding, dilation, groups, and the handle of ``Choices``.
    """
    stride, padding, output_padding, dilation, groups, tuning = settings
    choices, y = choices_of(tuning), None
    are_alike = x.dim() == w.dim() and x.dim() in (4, 5) and (w.dtype, w.device) == (x.dtype, x.device)
    if bias is not None and are_alike:
        expected = (w.shape[1] * groups,), x.dtype, x.device
        are_alike = (bias.shape, bias.dtype, bias.device) == expected
    if choices is not None and are_alike and is_backward_data(stride, output_padding):
        y = _as_backward_data(x, w, (stride, padding, dilation, groups), output_padding, choices)
    if y is None:  # torch reports the errors of operands that do not match
        return _torch_transposed(x, w, bias, *settings)
    return y if bias is None else y.add_(bias.view(-1, *[1] * (y.dim() - 2)))


def _torch_transposed(x: Tensor, w: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Return torch's own transposed convolution, or its fake result if the operands are fake."""
    stride, padding, output_padding, dilation, groups, _ = settings
    compute = functions.conv_transpose2d if x.dim() < 5 else functions.conv_transpose3d
    return compute(x, w, bias, stride, padding, output_padding, groups, dilation)


def _as_backward_data(
    x: Tensor, w: Tensor, geometry: Geometry, output_padding: Sequence[int], choices: Choices
) -> Tensor | None:
    """Return the transposed convolution without bias; None if torch's convolution is to run."""
    shape = transposed_shape(x.shape, w.shape, geometry, output_padding)
    if min(shape) < 1:
        return None
    lent = x.new_empty(()).expand(shape)  # has a shape but no memory, so that the filter determines the format of y
    wanted = torchs_memory_format(x, w, geometry, is_transposed=True, output_padding=output_padding)
    if torchs_memory_format(lent, w, geometry) is not wanted:
        w = torch.empty_like(w, memory_format=format_of(wanted, w.dim())).copy_(w)
        if torchs_memory_format(lent, w, geometry) is not wanted:
            return None  # a filter of one element is in both formats
    return computed(Operation.BACKWARD_DATA, lent, w, x, geometry, choices)


def _save_transposed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, *ctx.rest = inputs
    ctx.save_for_backward(x, w)  # without the bias, which may be changed in place before the backward pass
    channels_last = format_of(MemoryFormat.CHANNELS_LAST, output.dim())
    is_last = not output.is_contiguous() and output.is_contiguous(memory_format=channels_last)
    ctx.memory_format = channels_last if is_last else torch.contiguous_format


def _transposed_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Return the gradients of x, w and bias.

    dy: (N, C, H, W), the x of the convolution that this one transposes.
    """
    x, w = ctx.saved_tensors
    needs_dx, needs_dw, needs_bias = ctx.needs_input_grad[:3]
    stride, padding, output_padding, dilation, groups, tuning = ctx.rest
    if not (torch._C._functorch.is_batchedtensor(dy) or torch._C._functorch.is_legacy_batchedtensor(dy)):
        dy = dy.contiguous(memory_format=ctx.memory_format)  # as torch does; a vmap knows no memory formats
    if not is_backward_data(stride, output_padding):
        geometry = stride, padding, dilation, True, output_padding, groups
        bias_sizes = [w.shape[1] * groups] if needs_bias else None
        mask = needs_dx, needs_dw, needs_bias
        gradients = torch.ops.aten.convolution_backward(dy, x, w, bias_sizes, *geometry, mask)
        return *gradients, *(None for _ in ctx.rest)
    settings = stride, padding, dilation, groups, tuning
    dx = conv2d(dy, w, None, *settings) if needs_dx else None
    dw = OPERATORS[Operation.BACKWARD_FILTER](dy, w, x, *settings) if needs_dw else None
    return dx, dw, bias_gradient(dy) if needs_bias else None, *(None for _ in ctx.rest)


def _transposed_flops(x: Tensor, w: Tensor, bias: Tensor | None, *settings: Any, out_val: Tensor) -> int:
    stride, padding, output_padding, dilation, groups, _ = settings
    return _forward_flops(x, w, bias, stride, padding, dilation, True, output_padding, groups, out_val=out_val)


conv_transpose2d = _define(
    "conv_transpose2d(Tensor x, Tensor w, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] output_padding, "
    "SymInt[] dilation, SymInt groups, int tuning) -> Tensor",
    transposed_values,
    fake=_torch_transposed,
    save=_save_transposed,
    gradients=_transposed_gradients,
    flops=_transposed_flops,
)
