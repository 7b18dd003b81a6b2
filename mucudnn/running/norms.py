"""Modules whose norms run as groups: the user's modules, of classes derived from theirs and ``TunedNorm``.

The forward of the user's class runs as it is: running statistics, their counts, momentum and modes are its own. Only
the calls of ``torch.nn.functional``'s norms in it are computed by ours, where that is possible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from mucudnn.core.errors import InvalidInputError
from mucudnn.kernels.compiled import normalization
from mucudnn.kernels.compiled.normalization import PIXELS, Norm
from mucudnn.running.eager.hot_path import is_plain
from mucudnn.running.groups import GroupChoices, Normalized, Pending, compute
from mucudnn.running.modules import TunedModule, derived_tuned, require_free_names

_norm = cache(Norm)


class TunedNorm(TunedModule, nn.Module):
    """A module whose calls of norms run as groups.

    ``choices`` has what is computed together (``GroupChoices``); None to run torch's operators.
    """

    choices: GroupChoices | None  # type: ignore[assignment]

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self.choices is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return super().forward(*arguments, **named)  # type: ignore[misc]
        with _Calls(self):
            return super().forward(*arguments, **named)  # type: ignore[misc]


class _Calls(TorchFunctionMode):
    """The mode in which a module's calls of norms are computed by ours."""

    def __init__(self, module: TunedNorm) -> None:
        super().__init__()
        self.module = module
        self.is_recomputed = torch._C._current_graph_task_id() != -1  # in a backward pass, as checkpoints do

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        normalize = _NORMS.get(func)
        if normalize is not None:
            y = normalize(self, *args, **kwargs)
            if y is not NotImplemented:
                return y
        if self.is_recomputed and func is Tensor.add_ and args[0] is getattr(self.module, "num_batches_tracked", None):
            return args[0]  # it has been counted
        return func(*args, **kwargs)

    def result(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        running: tuple[Tensor, Tensor, float] | None = None,
        *,
        fixed: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        """Return the norm of x, pending if something may be computed with it.

        running: running mean, variance and momentum, to be updated.
        fixed: mean and variance of a norm that does not compute them.
        """
        if fixed is None:
            mean, inverse = _moments(x, norm, None if self.is_recomputed else running)
        else:
            mean, inverse = fixed[0].float(), (fixed[1].float() + norm.eps).rsqrt()
        choices = self.module.choices
        assert choices is not None
        normalized = Normalized(x, weight, bias, mean, inverse, norm, fixed is not None, choices)
        return Pending.of(normalized) if choices.defers and not _has_hooks(self.module) else compute(normalized, None)


def _moments(x: Tensor, norm: Norm, running: tuple[Tensor, Tensor, float] | None) -> tuple[Tensor, Tensor]:
    """Return the statistics of x, and update the running ones, of any floating-point dtype."""
    if running is None:
        return normalization.moments(x, norm)
    *statistics, momentum = running
    floats = [statistic.float() for statistic in statistics]
    moments = normalization.moments(x, norm, (*floats, momentum))
    for statistic, updated in zip(statistics, floats, strict=True):
        if updated is statistic:
            torch.autograd.graph.increment_version(statistic)
        else:
            statistic.copy_(updated)
    return moments


def _has_hooks(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]


def _may_run(x: Any, weight: Any, bias: Any, norm: Norm, *, with_autocast: bool = False) -> bool:
    """Return whether ours computes a norm of these operands: torch's own handles all others, and reports errors.

    with_autocast: whether autocast leaves the operands as they are.
    """
    if not isinstance(x, Tensor) or not is_plain(x) or x.dim() < 2 or x.numel() == 0:
        return False
    for parameter in (weight, bias):
        if parameter is None:
            continue
        if not is_plain(parameter) or parameter.dtype not in (x.dtype, torch.float32):
            return False
        if parameter.shape != (x.shape[1],) or not parameter.is_contiguous() or parameter.device != x.device:
            return False
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        return False
    is_watched = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    if is_watched or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if torch._C._get_tracing_state() is not None or (torch._C._is_any_autocast_enabled() and not with_autocast):
        return False
    return normalization.why_not(x, norm) is None


def _batch_norm(
    calls: _Calls,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    norm = _norm(0, eps)
    if not _may_run(input, weight, bias, norm, with_autocast=True):
        return NotImplemented
    statistics = _running(running_mean, running_var, input)
    if training and input.numel() > input.shape[1] and statistics is not NotImplemented:
        return calls.result(input, weight, bias, norm, statistics and (*statistics, momentum))
    if not training and isinstance(statistics, tuple):
        return calls.result(input, weight, bias, norm, fixed=statistics)
    return NotImplemented


def _running(mean: Tensor | None, variance: Tensor | None, x: Tensor) -> Any:
    """Return the running statistics; None if there are none, NotImplemented if torch's own handles them."""
    if mean is None and variance is None:
        return None
    for statistic in (mean, variance):
        if statistic is None or not is_plain(statistic) or statistic.shape != (x.shape[1],):
            return NotImplemented
        if not statistic.is_contiguous() or statistic.dtype not in (x.dtype, torch.float32) or statistic.requires_grad:
            return NotImplemented
    return mean, variance


def _instance_norm(
    calls: _Calls,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not use_input_stats or running_mean is not None or input.dim() < 3 or input.shape[2:].numel() == 1:
        return NotImplemented
    norm = _norm(input.shape[1], eps)
    return calls.result(input, weight, bias, norm) if _may_run(input, weight, bias, norm) else NotImplemented


def _group_norm(
    calls: _Calls,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    is_valid = input.dim() > 1 and num_groups > 0 and input.shape[1] % num_groups == 0
    if not is_valid or input.numel() == input.shape[0] * num_groups:
        return NotImplemented
    norm = _norm(num_groups, eps)
    return calls.result(input, weight, bias, norm) if _may_run(input, weight, bias, norm) else NotImplemented


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
        return NotImplemented
    if input.shape[-1:] != tuple(normalized_shape):
        return NotImplemented
    norm, pixels = _norm(PIXELS, eps), input.flatten(0, -2)
    if not _may_run(pixels, weight, bias, norm):
        return NotImplemented
    y = calls.result(pixels, weight, bias, norm)
    return y.view(input.shape)


_NORMS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
}


# Modules of models


def make_groups(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, TunedNorm | str]:
    """Make the norms of a model run as groups.

    run: runs a training step of the model; it is called twice, and what the model refers to may change.

    Returns the modules by name, or the reason why one is left alone. A module is one whose own forward calls a norm:
    PyTorch's, or a user's, which may have an activation or a permutation of its own.
    """
    names = {module: name for name, module in model.named_modules()}
    results: dict[str, TunedNorm | str] = {}
    for module in _norm_modules(model, run):
        try:
            _make_tunable(module)
        except InvalidInputError as error:
            results[names[module]] = str(error)
        else:
            vars(module)["choices"] = GroupChoices(calls=Counter())
            results[names[module]] = module
    run(model)
    return results


def _make_tunable(module: nn.Module) -> None:
    """Turn a module into a ``TunedNorm``. Raises ``InvalidInputError`` if that is not possible."""
    if isinstance(module, TunedNorm):
        return
    require_free_names(module)
    if is_parametrized(module):
        raise InvalidInputError("its parameters are parametrized")
    if any(isinstance(part, _ConvNd) for part in module.modules()):
        raise InvalidInputError(f"{type(module).__name__} calls a norm in a forward that also computes convolutions")
    object.__setattr__(module, "__class__", derived_tuned(TunedNorm, type(module)))


def _norm_modules(model: nn.Module, run: Callable[[nn.Module], object]) -> list[nn.Module]:
    """Return the modules in whose own forward norms are called, in a run of the model."""
    found: dict[nn.Module, None] = {}
    running: list[nn.Module] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in _NORMS and running:
                found[running[-1]] = None
            return func(*args, **(kwargs or {}))

    before = nn.modules.module.register_module_forward_pre_hook(lambda module, _: running.append(module))
    after = nn.modules.module.register_module_forward_hook(lambda *_: running.pop() and None, always_call=True)
    try:
        with Recorder():
            run(model)
    finally:
        before.remove()
        after.remove()
    return [*found]
