"""The drop-in for ``torch.nn.Conv2d``, and ``optimize``, which tunes a model's convolutions and swaps them for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from mucudnn import operators
from mucudnn.config import Config
from mucudnn.configuration import NATIVE, Configuration
from mucudnn.operators import Choices
from mucudnn.problem import ConvProblem, Operation

if TYPE_CHECKING:
    from mucudnn.bench.tracing import Call
    from mucudnn.tuning import TunedProblem, Tuning

Progress = Callable[[str, float], None]
_Wanted = dict[int, dict[str, dict[ConvProblem, None]]]  # batch size, largest first -> module name -> problems


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
        if not isinstance(x, Tensor) or not _operator_takes(x):  # a torch.fx.Proxy, for one, is no tensor
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
    if x.dim() not in (3, 4) or x.is_complex() or x.layout is not torch.strided:
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
        wanted = _wanted(model, sample_input, config)
        tunings = _tune(model, wanted, config, progress)
    _swap(model, wanted, tunings)
    return model


@dataclass(frozen=True, slots=True)
class Report:
    """What was chosen for the convolutions of a model, with the names of their modules; ``str`` of it is for people."""

    layers: tuple[tuple[str, TunedProblem], ...]

    def __str__(self) -> str:
        if not self.layers:
            return "no tuned convolutions: call mucudnn.optimize(model, sample_input) first"
        return "\n".join(f"{name or '(the model itself)'}: {tuned}" for name, tuned in self.layers)


def report(model: torch.nn.Module) -> Report:
    """What ``optimize`` chose for each convolution of ``model`` and why; it is empty if nothing is tuned."""
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, Conv2d))
    return Report(tuple((name, tuned) for name, module in modules for tuned in module.tuned))


def _wanted(model: torch.nn.Module, sample_input: Any, config: Config) -> _Wanted:
    from mucudnn.bench.tracing import trace  # here and not above: running a tuned model needs no tracing

    modules = dict(model.named_modules())
    wanted: _Wanted = {}
    for call in sorted(trace(model, sample_input), key=lambda call: -call.batch_size):
        if type(modules[call.name]) in (torch.nn.Conv2d, Conv2d):
            of_module = wanted.setdefault(call.batch_size, {}).setdefault(call.name, {})
            of_module.update(dict.fromkeys(_problems(call, config)))
    return wanted


def _problems(call: Call, config: Config) -> Iterator[ConvProblem]:
    """One for each operation that is tuned; dx of the model's own input is not: nobody asks for it."""
    for operation in config.operations:
        if operation is not Operation.BACKWARD_DATA or call.input_needs_gradient:
            yield call.problem.with_operation(operation)


def _tune(model: torch.nn.Module, wanted: _Wanted, config: Config, progress: Progress | None) -> dict[int, Tuning]:
    """Batch size -> tuning, in the order of ``wanted``."""
    from mucudnn.tuner import tune  # here and not above: running a tuned model needs neither profiler nor solver

    tunings = {}
    for batch_size, of_modules in wanted.items():
        problems = dict.fromkeys(problem for problems in of_modules.values() for problem in problems)
        device = next(model.parameters()).device.type
        tunings[batch_size] = tune(problems, batch_size, config, device=device, progress=progress)
    return tunings


def _swap(model: torch.nn.Module, wanted: _Wanted, tunings: dict[int, Tuning]) -> None:
    modules = dict(model.named_modules())
    for name in {name for of_modules in wanted.values() for name in of_modules}:
        its_own = [(tunings[n], problem) for n, of_modules in wanted.items() for problem in of_modules.get(name, ())]
        modules[name].__class__ = Conv2d
        swapped = cast(Conv2d, modules[name])
        swapped.tuned = tuple(tuning[problem] for tuning, problem in its_own)
        swapped.choices = _choices(its_own, swapped.weight.device.type)


def _choices(chosen: Sequence[tuple[Tuning, ConvProblem]], device_type: str) -> Choices | None:
    """``None`` where torch won everywhere: then the module is torch's own, without the operator's overhead.

    Smaller batches than the tuned one were not run against torch, and torch's own was not measured undivided for each
    of them: so a mere division of it is not taken.
    """
    configurations: dict[ConvProblem, dict[int, Configuration]] = {}
    for tuning, problem in chosen:  # largest batch first: what was tuned for a smaller one overrides
        tuned = tuning[problem]
        for n, configuration in tuning.configurations(problem).items():
            if n == tuned.batch_size or configuration.algorithms != (NATIVE,):
                configurations.setdefault(problem, {})[n] = configuration
    every = [configuration for by_size in configurations.values() for configuration in by_size.values()]
    if all(configuration.is_baseline for configuration in every):
        return None
    return Choices.of(configurations, device_type)


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
