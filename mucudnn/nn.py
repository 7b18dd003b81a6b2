"""The drop-in for ``torch.nn.Conv2d``, and ``optimize``, which tunes a model's convolutions and swaps them for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from mucudnn import operators
from mucudnn.config import Config
from mucudnn.configuration import NATIVE, Configuration
from mucudnn.operators import Choices
from mucudnn.problem import ConvProblem, Operation
from mucudnn.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from mucudnn.bench.tracing import Call
    from mucudnn.tuner import TunedProblem

Progress = Callable[[str, float], None]
_Tuned: TypeAlias = "dict[tuple[ConvProblem, int], TunedProblem]"


class Conv2d(torch.nn.Conv2d):
    """A ``torch.nn.Conv2d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution.
    ``tuned`` says what was chosen for it and why. x: (N, C, H, W) or (C, H, W), y: (N, K, P, Q) or (K, P, Q).
    """

    tuned: tuple[TunedProblem, ...] = ()
    choices: Choices | None = None

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = None if self.choices is None else self._tuned_forward(self.choices, input, weight, bias)
        return super()._conv_forward(input, weight, bias) if y is None else y

    def _tuned_forward(self, choices: Choices, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """``None`` where nothing is tuned: torch's convolution, without the overhead of the operator."""
        if not _operator_takes(x):
            return None
        if x.dim() == 3:
            y = self._tuned_forward(choices, x.unsqueeze(0), weight, bias)
            return None if y is None else y.squeeze(0)
        x, padding = self._padded(x, weight)
        if not torch.compiler.is_compiling() and x.shape not in choices.x_shapes:
            return None
        return operators.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups, choices.handle)

    def _padded(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        """Pad here what is not zeros on both sides alike; the rest of the padding is for the operator."""
        if self.padding_mode != "zeros":
            return F.pad(x, self._reversed_padding_repeated_twice, self.padding_mode), (0, 0)
        if self.padding == "valid":
            return x, (0, 0)
        if self.padding == "same":
            total_h, total_w = (d * (size - 1) for d, size in zip(self.dilation, weight.shape[2:], strict=True))
            if total_h % 2 or total_w % 2:  # an even filter: the odd row and column belong to the bottom and right
                x = F.pad(x, (0, total_w % 2, 0, total_h % 2))
            return x, (total_h // 2, total_w // 2)
        return x, self.padding


def _operator_takes(x: Tensor) -> bool:
    """The operators have no forward-mode derivative, no rules for ``torch.func`` and no complex arithmetic."""
    if x.dim() not in (3, 4) or x.is_complex():
        return False
    if torch.compiler.is_compiling():
        return True
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


def optimize(
    model: torch.nn.Module,
    sample_input: Any,
    config: Config | None = None,
    *,
    progress: Progress | None = None,
) -> torch.nn.Module:
    """Tune the convolutions that ``model(sample_input)`` runs, and make them ``mucudnn.Conv2d``; returns the model.

    The modules themselves are turned: parameters, hooks, names, mode and device stay as they are, and a module that
    occurs twice is one still. Subclasses of ``torch.nn.Conv2d``, parametrized ones included, are left alone. The
    forward pass that finds the shapes leaves no trace in mode, buffers, gradients and random state.
    ``progress`` is called with what is being measured and the fraction that is done, as in ``tune``.
    ``report(model)`` tells what was chosen.

    Raises what ``tune`` raises, and whatever the model raises on ``sample_input``; the model is then unchanged.
    """
    config = config or Config()
    with _undisturbed(model):
        calls = _swappable_calls(model, sample_input)
        tuned = _tuned(model, calls, config, progress)
    _swap(model, calls, tuned, config)
    return model


@dataclass(frozen=True, slots=True)
class Report:
    """What was chosen for the convolutions of a model, by module name; ``str`` of it is a table for people."""

    layers: tuple[tuple[str, TunedProblem], ...]

    def __str__(self) -> str:
        if not self.layers:
            return "no tuned convolutions: call mucudnn.optimize(model, sample_input) first"
        header = ("layer", "problem", "N", "torch", "mucudnn", "speedup", "workspace", "configuration", "why")
        rows = [header, *(_row(name, tuned) for name, tuned in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def report(model: torch.nn.Module) -> Report:
    """What ``optimize`` chose for each convolution of ``model`` and why; it is empty if nothing is tuned."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, Conv2d))
    return Report(tuple((name or "(model)", tuned) for name, module in modules for tuned in module.tuned))


def _row(name: str, tuned: TunedProblem) -> tuple[str, ...]:
    times = format_seconds(tuned.baseline_s), format_seconds(tuned.time_s), f"{tuned.speedup:.2f}"
    workspace = format_bytes(tuned.configuration.workspace_bytes)
    return name, str(tuned.problem), str(tuned.batch_size), *times, workspace, str(tuned.configuration), tuned.reason


def _swappable_calls(model: torch.nn.Module, sample_input: Any) -> list[Call]:
    from mucudnn.bench.tracing import trace  # here and not above: running a tuned model needs no tracing

    modules = dict(model.named_modules())
    calls = trace(model, sample_input)
    return [call for call in calls if type(modules[call.name]) in (torch.nn.Conv2d, Conv2d)]


def _operations(call: Call, config: Config) -> list[ConvProblem]:
    """One problem for each operation that is tuned: dx of the network's own input is nobody's wish."""
    skipped = () if call.input_needs_gradient else (Operation.BACKWARD_DATA,)
    return [call.problem.with_operation(o) for o in config.operations if o not in skipped]


def _tuned(model: torch.nn.Module, calls: list[Call], config: Config, progress: Progress | None) -> _Tuned:
    from mucudnn import tuner  # here and not above: running a tuned model needs neither profiler nor solver

    tuned: _Tuned = {}
    for batch_size in sorted({call.batch_size for call in calls}):
        same = [call for call in calls if call.batch_size == batch_size]
        problems = dict.fromkeys(problem for call in same for problem in _operations(call, config))
        device = next(model.parameters()).device.type
        tuning = tuner.tune(problems, batch_size, config, device=device, progress=progress)
        tuned |= {(t.problem, batch_size): t for t in tuning.problems}
    return tuned


def _swap(model: torch.nn.Module, calls: list[Call], tuned: _Tuned, config: Config) -> None:
    modules = dict(model.named_modules())
    for name in dict.fromkeys(call.name for call in calls):
        keys = dict.fromkeys(
            (problem, call.batch_size) for call in calls if call.name == name for problem in _operations(call, config)
        )
        modules[name].__class__ = Conv2d
        swapped = cast(Conv2d, modules[name])
        swapped.tuned = tuple(tuned[key] for key in keys if key in tuned)
        swapped.choices = _choices(swapped.tuned, config)


def _choices(tuned: Iterable[TunedProblem], config: Config) -> Choices | None:
    """``None`` where torch won everywhere: then the module is torch's own, without the operator's overhead."""
    configurations: dict[ConvProblem, dict[int, Configuration]] = {}
    for t in tuned:
        if not t.configuration.is_baseline:
            configurations.setdefault(t.problem, {}).update(_by_batch_size(t, config))
    return Choices.of(configurations) if configurations else None


def _by_batch_size(tuned: TunedProblem, config: Config) -> dict[int, Configuration]:
    """The verified configuration, and for smaller batches the fastest that the same measurements allow.

    Smaller batches were not run against torch: pieces of torch's own convolution are not taken for faster than it.
    """
    from mucudnn.solver.front import desirable_sets

    bound = config.error_bound(tuned.problem.dtype)
    front = desirable_sets([m for m in tuned.measurements if m.relative_error <= bound], tuned.batch_size)
    fastest = ((n, front.fastest(n, config.workspace_limit_bytes)) for n in range(1, tuned.batch_size))
    smaller = {n: c for n, c in fastest if c is not None and c.algorithms != (NATIVE,)}
    return smaller | {tuned.batch_size: tuned.configuration}


@contextmanager
def _undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Afterwards the model's mode and buffers (running statistics) and the random state are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gpus = {p.device.index for p in model.parameters() if p.is_cuda}
    try:
        with torch.random.fork_rng(sorted(gpus)), torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for buffer, before in buffers:
            buffer.detach().copy_(before)
