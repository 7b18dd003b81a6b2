"""Modules whose norms run as groups: the user's modules, of classes derived from theirs and ``TunedNorm``.

The forward of the user's class runs as it is: running statistics, their counts, momentum and modes are its own. Only
the calls of ``torch.nn.functional``'s norms in it are computed by ours, where that is possible.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from mucudnn.core.errors import InvalidInputError
from mucudnn.kernels.compiled import normalization
from mucudnn.kernels.compiled.normalization import PIXELS, Norm
from mucudnn.running import tape
from mucudnn.running.eager.bound_norm import BoundNorm
from mucudnn.running.eager.hot_path import batch_norm_key, is_plain
from mucudnn.running.groups import GroupChoices, Normalized, compute, moments_of, noting_sources, source_of
from mucudnn.running.modules import TunedModule, derived_tuned, require_free_names, why_fixed
from mucudnn.running.pending import Pending

NORMS = _NormBase, nn.GroupNorm, nn.LayerNorm  # torch's modules that call norms

_BATCH_NORM = F.batch_norm
_MOST_KNOWN = 4096

_known: dict[bytes, BoundNorm] = {}  # by ``batch_norm_key``


@cache
def _norm(sets: int, eps: float, *, is_fixed: bool = False) -> BoundNorm:
    return BoundNorm(Norm(sets, eps), is_fixed)


class TunedNorm(TunedModule, nn.Module):
    """A module whose calls of norms run as groups.

    choices: what is computed together; None to run torch's operators.
    groups: the calls in a step and their times, as reported.
    why_torchs: the reason why calls run torch's operators; empty if none does.
    """

    choices: GroupChoices | None = None  # type: ignore[assignment]
    groups: tuple[Any, ...] = ()
    why_torchs: str = ""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self.choices is None or torch.compiler.is_compiling():
            return super().forward(*arguments, **named)
        is_recomputed = torch._C._current_graph_task_id() != -1  # in a backward pass, as checkpoints do
        if not torch.is_grad_enabled() and not is_recomputed:
            return super().forward(*arguments, **named)
        arguments = _computed(arguments)
        calls = _Calls(self, self.choices, is_recomputed)
        is_torchs = super(TunedNorm, type(self)).forward is _BatchNorm.forward
        if is_torchs and not is_recomputed and len(arguments) == 1 and not named:
            y = calls.batch_norm(arguments[0])
            if y is not NotImplemented:
                return y
        with _Mode(calls):
            return super().forward(*arguments, **named)


def _computed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return positional arguments with computed tensors in the place of pending ones."""
    return (*(argument.computed() if isinstance(argument, Pending) else argument for argument in arguments),)


class _Mode(TorchFunctionMode):
    """The mode in which a module's calls of norms are computed by ours."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        calls, kwargs, normalize = self.calls, kwargs or {}, _COMPUTED.get(func)
        if normalize is not None:
            args = _computed(args)
            y = normalize(calls, *args, **kwargs)
            if y is not NotImplemented:
                return y
        if calls.is_recomputed:
            if func is Tensor.add_ and args[0] is getattr(calls.module, "num_batches_tracked", None):
                return args[0]
            if normalize is not None:
                args, kwargs = tree_map_only(Tensor, calls.unless_buffer, (args, kwargs))
        return func(*args, **kwargs)


@dataclass(slots=True)
class _Calls:
    """The calls of norms in a call of a module.

    is_recomputed: whether they have been computed before, so that running statistics have been updated.
    """

    module: TunedNorm
    choices: GroupChoices
    is_recomputed: bool

    def batch_norm(self, x: Tensor) -> Any:
        """Return what the forward of PyTorch's batch norm does; NotImplemented in unusual cases."""
        module = cast(_BatchNorm, self.module)
        is_training, count, momentum = module.training, module.num_batches_tracked, module.momentum
        if count is None or momentum is None or not module.track_running_stats or F.batch_norm is not _BATCH_NORM:
            return NotImplemented
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        running = module.running_mean, module.running_var
        y = _batch_norm(self, x, *running, module.weight, module.bias, is_training, momentum, module.eps)
        if y is not NotImplemented and is_training:
            count.add_(1)
        return y

    def unless_buffer(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy if it is a buffer of the module, which torch's norms would update."""
        return tensor.clone() if any(tensor is buffer for buffer in self.module.buffers()) else tensor

    def are_torchs(self, why: str | None) -> bool:
        """Note the reason, if any, why torch computes a call, and return whether there is one."""
        if why is not None and self.choices.is_counting:
            self.choices.refusals.add(why)
        if self.is_recomputed:
            return why is not None or self.choices.was_refused
        self.choices.was_refused = why is not None
        return self.choices.was_refused

    def result(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        bound: BoundNorm,
        running: tuple[Tensor, Tensor, float] | None = None,
        *,
        fixed: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Return the norm of x, pending if something may be computed with it.

        running: running mean, variance and momentum, to be updated.
        fixed: mean and variance of a norm that does not compute them.
        """
        if fixed is None:
            mean, inverse = statistics_of(x, bound, None if self.is_recomputed else running)
        else:
            mean, inverse = fixed[0].float(), (fixed[1].float() + bound.norm.eps).rsqrt()
        source = source_of(x) if bound.norm.sets == 0 and fixed is None else None
        if source is not None and self.choices.is_counting:
            self.choices.sources.append(source)
        normalized = Normalized(x, weight, bias, mean, inverse, bound, self.choices)
        if not self.choices.defers or _has_hooks(self.module):
            return compute(normalized)
        pending = Pending.of(normalized)
        if self.choices.is_counting:
            self.choices.pendings.append(weakref.ref(pending))
        return pending


def statistics_of(x: Tensor, bound: BoundNorm, running: tuple[Tensor, Tensor, float] | None) -> tuple[Tensor, Tensor]:
    """Return the statistics of x, and update the running ones."""
    computed = moments_of(x) if bound.norm.sets == 0 else None
    if computed is not None:
        return moments_from(computed, x.shape[1], bound.norm.eps, running)
    if running is not None:
        tape.overwrite(*running[:2])
    moments: Any = NotImplemented
    if bound.compiled is not None:
        moments = bound.compiled.moments(x, *(running or (None, None, 0.0)))
    if moments is NotImplemented:
        moments = normalization.moments(x, bound.norm, running)
    if running is not None:
        torch.autograd.graph.increment_version(running[:2])
    return cast(tuple[Tensor, Tensor], moments)


@torch.no_grad()
def moments_from(
    moments: Tensor, channels: int, eps: float, running: tuple[Tensor, Tensor, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the statistics of batch norm that a convolution has computed, and update the running ones.

    moments: as of ``zero_moments``.
    """
    count, mean, squares = moments[0, :3, :channels]
    if running is not None:
        *statistics, momentum = running
        for statistic, value in zip(statistics, (mean, squares / (count - 1)), strict=True):
            statistic.lerp_(value.to(statistic.dtype), momentum)
    return mean.float(), (squares / count + eps).rsqrt().float()


def _has_hooks(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]


def _why_torchs(x: Any, weight: Any, bias: Any, norm: BoundNorm, *, with_autocast: bool = False) -> str | None:
    """Return why torch's own computes a norm of these operands, and reports errors; None if ours does.

    with_autocast: whether autocast leaves the operands as they are.
    """
    if not isinstance(x, Tensor) or not is_plain(x) or x.dim() < 2 or x.numel() == 0:
        return "its input is not a plain tensor with channels"
    parameters = [parameter for parameter in (weight, bias) if parameter is not None]
    for parameter in parameters:
        if not is_plain(parameter) or parameter.shape != (x.shape[1],) or not parameter.is_contiguous():
            return "its parameters are not plain vectors of channels"
        if parameter.dtype not in (x.dtype, torch.float32) or parameter.dtype != parameters[0].dtype:
            return f"its input is {x.dtype}, and a parameter {parameter.dtype}"
    if not torch.is_grad_enabled():
        return "gradients are not recorded"
    is_watched = (
        torch._C._len_torch_dispatch_stack() > (tape.recording() is not None)
    ) or torch._C._len_torch_function_stack()
    if is_watched or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "a mode or a transform of PyTorch is active"
    if torch._C._get_tracing_state() is not None or (torch._C._is_any_autocast_enabled() and not with_autocast):
        return "autocast or a tracer is active"
    return normalization.why_not(x, norm.norm)


def _batch_norm(
    calls: _Calls,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: Any = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    norm = _norm(0, eps, is_fixed=not training)
    key = batch_norm_key(norm, input, weight, bias, running_mean, running_var)
    bound = None if key is None else _known.get(key)
    why = None
    if bound is None:
        why = _why_torchs(input, weight, bias, norm, with_autocast=True)
        if why is None and training and input.numel() == input.shape[1]:
            why = "a channel has a single value"
        elif why is None and not input.is_contiguous() and input.dim() not in (4, 5):
            why = "torch's batch norm returns another memory format"
        why = why or _why_not_running(running_mean, running_var, input, training)
    if calls.are_torchs(why):
        return NotImplemented
    if bound is None:
        bound = norm
        if key is not None:
            parameter = bias if weight is None else weight
            bound = norm.with_operands(input, parameter, running_mean)
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[key] = bound
    if running_mean is None or running_var is None:
        return calls.result(input, weight, bias, bound)
    if training:
        return calls.result(input, weight, bias, bound, (running_mean, running_var, momentum))
    return calls.result(input, weight, bias, bound, fixed=(running_mean, running_var))


def _why_not_running(mean: Tensor | None, variance: Tensor | None, x: Tensor, training: Any) -> str | None:
    """Return why torch's own handles running statistics; None if ours does, or if there are none to handle."""
    if training and mean is None and variance is None:
        return None
    for statistic in (mean, variance):
        if statistic is None or not is_plain(statistic) or statistic.shape != (x.shape[1],):
            return "its running statistics are not two plain vectors of channels"
        if not statistic.is_contiguous() or statistic.dtype not in (x.dtype, torch.float32) or statistic.requires_grad:
            return "its running statistics are of another dtype, not contiguous, or differentiable"
    if mean is not None and variance is not None and mean.dtype != variance.dtype:
        return "its running statistics are of two dtypes"
    return None


def _instance_norm(
    calls: _Calls,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: Any = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if input.dim() < 2:
        return NotImplemented  # torch reports the error
    norm = _norm(input.shape[1], eps)
    why = _why_torchs(input, weight, bias, norm)
    if not use_input_stats or running_mean is not None:
        why = "an instance norm has running statistics"
    elif why is None and (input.dim() < 3 or input.shape[2:].numel() == 1):
        why = "a channel has a single value"
    elif why is None and not input.is_contiguous():
        why = "torch's instance norm returns another memory format"
    if calls.are_torchs(why):
        return NotImplemented
    return calls.result(input, weight, bias, norm)


def _group_norm(
    calls: _Calls,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if input.dim() < 2 or num_groups < 1 or input.shape[1] % num_groups:
        return NotImplemented  # torch reports the error
    norm = _norm(num_groups, eps)
    why = _why_torchs(input, weight, bias, norm)
    if why is None and input.numel() == input.shape[0] * num_groups:
        why = "a group has a single value"
    elif why is None and not input.is_contiguous() and (len(input) == 1 or input.dim() not in (4, 5)):
        why = "torch's group norm returns another memory format"
    if calls.are_torchs(why):
        return NotImplemented
    return calls.result(input, weight, bias, norm)


def _layer_norm(
    calls: _Calls,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Normalize pixels over their channels, which are the last dimension."""
    if len(normalized_shape) != 1 or not is_plain(input) or not input.is_contiguous() or input.dim() < 2:
        calls.are_torchs("a layer norm is over more than the last dimension, or its input is not contiguous")
        return NotImplemented
    if input.shape[-1:] != tuple(normalized_shape):
        return NotImplemented  # torch reports the error
    norm, pixels = _norm(PIXELS, eps), input.flatten(0, -2)
    if calls.are_torchs(_why_torchs(pixels, weight, bias, norm)):
        return NotImplemented
    y = calls.result(pixels, weight, bias, norm)
    return y.view(input.shape)


_COMPUTED: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
}


# Modules of models


def make_groups(model: nn.Module, run: Callable[[nn.Module], object]) -> list[TunedNorm]:
    """Make the norms of a model run as groups, and return the modules, with choices for the calls in a step.

    A module is one whose own forward calls a norm: PyTorch's, or a user's, which may have an activation or a
    permutation of its own.

    run: runs the forward pass of a training step, and returns the output. It is called twice, and what the model refers
        to may change.

    Raises any error of the model; no module runs as a group then.
    """
    modules = [module for module in _norm_modules(model, run) if why_not_grouped(module) is None]
    choices = [GroupChoices(is_counting=True) for _ in modules]
    try:
        for module, settled in zip(modules, choices, strict=True):
            object.__setattr__(module, "__class__", _tuned_class(module))
            vars(module)["choices"] = settled
        with noting_sources():
            output = tree_map_only(Pending, _returned, run(model))
    except BaseException:
        for module in modules:
            vars(module)["choices"] = None
        raise
    for settled in choices:
        settled.settle()
    del output  # with what is kept for the backward pass
    return cast(list[TunedNorm], modules)


def _returned(pending: Pending) -> Tensor:
    """Compute a pending tensor that a model returns, and note that its norm must not return others."""
    if pending.normalized.bound.norm.function is None:
        pending.normalized.choices.is_returned = True
    return pending.computed()


def why_not_grouped(module: nn.Module) -> str | None:
    """Return the reason why the norms that a module calls cannot run as groups; None if they can."""
    return why_fixed(module, _tuned_class)


def _tuned_class(module: nn.Module) -> type[nn.Module]:
    if isinstance(module, TunedNorm):
        return type(module)
    require_free_names(module)
    if is_parametrized(module):
        raise InvalidInputError("its parameters are parametrized")
    if any(isinstance(part, _ConvNd) for part in module.modules()):
        raise InvalidInputError(f"{type(module).__name__} calls a norm in a forward that also computes convolutions")
    return derived_tuned(TunedNorm, type(module))


def _norm_modules(model: nn.Module, run: Callable[[nn.Module], object]) -> list[nn.Module]:
    """Return the modules of a model in whose own forward norms are called, in a run."""
    modules: dict[nn.Module, None] = {}
    entered: list[nn.Module] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in _COMPUTED and entered:
                modules[entered[-1]] = None
            return func(*args, **(kwargs or {}))

    def leave(*_: object) -> None:
        entered.pop()

    before = nn.modules.module.register_module_forward_pre_hook(lambda module, _: entered.append(module))
    after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
    try:
        with Recorder():
            run(model)
    finally:
        before.remove()
        after.remove()
    return [module for module in model.modules() if module in modules]
