"""The groups of a model that trains: which norms run as groups, by the time of each kind beside PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mucudnn.core.config import Config
from mucudnn.core.errors import warn
from mucudnn.core.problem import Operation
from mucudnn.core.records import Comparison
from mucudnn.core.team import Team
from mucudnn.core.terminal import Progress
from mucudnn.core.values import format_seconds
from mucudnn.kernels.algorithm import Prologue, zero_moments
from mucudnn.kernels.compiled import normalization
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.compiled.normalization import Norm
from mucudnn.measuring.heap import kept_heap
from mucudnn.measuring.operands import random_operands
from mucudnn.measuring.timings import Timings
from mucudnn.measuring.turns import Rounds
from mucudnn.running.choices import Choices, make_executable, within_limits
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.eager.bound_norm import BoundNorm
from mucudnn.running.executable import Executable
from mucudnn.running.groups import GroupCall, GroupChoices, Normalized, by_torch, compute
from mucudnn.running.modules import TunedModule
from mucudnn.running.norms import make_groups, moments_from, statistics_of
from mucudnn.running.pending import ChangedError
from mucudnn.tuning.choose import with_noise
from mucudnn.tuning.model_state import is_training, leaf
from mucudnn.tuning.tuner import machine_and_database

_ROUNDS = Rounds(3, 7, 0.3, sure=3)  # of a kind of call, forward and backward, beside PyTorch's operators
_LEAST_GAIN_S = 4e-5  # of a convolution that normalizes: it is called from Python, others by the extension


@dataclass(frozen=True, slots=True)
class TunedGroup:
    """Calls of one kind of a norm in a step, timed forward and backward with PyTorch's operators and as a group."""

    call: GroupCall
    calls: int
    comparison: Comparison

    def __str__(self) -> str:
        times = f"PyTorch {format_seconds(self.baseline_s)}, mucudnn {format_seconds(self.time_s)}"
        return f"group {self.call}, x {self.call.shape}, {self.calls} calls: {times}, {with_noise(self.comparison)}"

    @property
    def baseline_s(self) -> float:
        """The seconds of all calls in a step with PyTorch's operators."""
        return self.calls * self.comparison.baseline_s

    @property
    def time_s(self) -> float:
        """The seconds of all calls in a step as groups."""
        return self.calls * self.comparison.time_s


def tune_groups(model: nn.Module, sample_input: Any, config: Config, team: Team, progress: Progress) -> None:
    """Make the norms of a model in training run as groups where these are faster.

    Each kind of call is timed once, by itself, and its time is stored; rank 0 decides for all.
    """
    is_on_cpu = device_of_convolutions(model).type == "cpu" and loaded_build().library is not None
    if config.fuse is False or not is_on_cpu or not is_training(model):
        return
    arguments = sample_input if isinstance(sample_input, tuple) else (sample_input,)
    progress("finding groups", 1.0)
    try:
        norms = make_groups(model, lambda module: module(*tree_map(leaf, arguments)))
    except ChangedError as error:
        warn(f"norms are PyTorch's own: {error}")
        return
    choices = [norm.choices for norm in norms if norm.choices is not None]
    kinds = list(dict.fromkeys(call for of_norm in choices for call in of_norm.calls))
    comparisons = team.of_rank_0({} if team.rank else _comparisons(kinds, config, progress))
    for norm, of_norm in zip(norms, choices, strict=True):
        groups = tuple(TunedGroup(call, count, comparisons[call]) for call, count in of_norm.calls.items())
        vars(norm).update(groups=groups, why_torchs="; ".join(sorted(of_norm.refusals)))
        if groups and sum(group.time_s - group.baseline_s for group in groups) >= 0:
            vars(norm).update(choices=None, why_torchs="nothing is faster")
    running = [of_norm for of_norm, norm in zip(choices, norms, strict=True) if norm.choices is not None]
    _let_compute_moments([source for of_norm in running for source in of_norm.sources], config, team, progress)
    _let_normalize(running, config, team, progress)
    for of_norm in choices:
        of_norm.sources.clear()
        of_norm.readers.clear()


def _let_compute_moments(convolutions: Sequence[TunedModule], config: Config, team: Team, progress: Progress) -> None:
    """Have convolutions compute the moments of y, for the norms behind them, where that is faster than a norm's own."""
    gains = team.of_rank_0([] if team.rank else _gains_of_moments(convolutions, config, progress))
    for convolution, gain in zip(convolutions, gains, strict=True):
        vars(convolution)["computes_moments"] = gain
        _set_fused(convolution)


def _let_normalize(norms: Sequence[GroupChoices], config: Config, team: Team, progress: Progress) -> None:
    """Have convolutions normalize x as they read x, the results of these norms, where that is faster."""
    pairs = [(convolution, _norm_read(of_norm)) for of_norm in norms for convolution in of_norm.readers]
    readers = {convolution: norm for convolution, norm in pairs if norm is not None}
    gains = team.of_rank_0([] if team.rank else _gains_of_normalization(readers, config, progress))
    for convolution, operations in zip(readers, gains, strict=True):
        vars(convolution)["normalizes"] = operations
        _set_fused(convolution)
    for of_norm in norms:
        fuse = (Operation.FORWARD in convolution.normalizes for convolution in of_norm.readers)
        of_norm.defers_activations = of_norm.has_one_reader and _norm_read(of_norm) is not None and all(fuse)


def _norm_read(of_norm: GroupChoices) -> Norm | None:
    """Return the norm and activation of a module whose calls are of one kind; None if no convolution fuses them."""
    norms = {None if call.has_addition or call.norm.sets != 0 else call.norm for call in of_norm.calls}
    return norms.pop() if len(norms) == 1 else None


def _set_fused(convolution: TunedModule) -> None:
    computes_moments, normalizes, choices = convolution.computes_moments, convolution.normalizes, convolution.choices
    if choices is not None and (computes_moments or normalizes):
        fusing = choices.fusing(computes_moments=computes_moments, normalizes=normalizes)
        vars(convolution)["choices"] = fusing


def _gains_of_normalization(
    readers: Mapping[TunedModule, Norm], config: Config, progress: Progress
) -> list[frozenset[Operation]]:
    """Return the operations of each convolution that are faster if they normalize x than after a norm of its own."""
    gains: list[frozenset[Operation]] = []
    if not readers:
        return gains
    with _timings(config, progress) as timings:
        for number, (convolution, norm) in enumerate(readers.items()):
            progress("measuring norms in convolutions", number / len(readers))
            faster: dict[Operation, bool] = {}
            for executable, normalizing in _normalizing(convolution.choices):
                operation = executable.problem.operation
                comparison = _with_prologue(executable, normalizing, norm, timings)
                gain_s = comparison.baseline_s - comparison.time_s
                faster[operation] = faster.get(operation, True) and gain_s > _LEAST_GAIN_S
            gains.append(frozenset(operation for operation, is_faster in faster.items() if is_faster))
    return gains


def _normalizing(choices: Choices | None) -> Iterator[tuple[Executable, Executable]]:
    """Yield the executables of choices, at their largest batch sizes, that can normalize x, and those that do."""
    if choices is None:
        return
    for problem, by_size in choices.configurations.items():
        executable = make_executable(choices, problem, max(by_size)) if by_size else None
        normalizing = None if executable is None else within_limits(choices, executable)
        if executable is not None and normalizing is not None:
            yield executable, normalizing


def _with_prologue(executable: Executable, normalizing: Executable, norm: Norm, timings: Timings) -> Comparison:
    """Compare a convolution that normalizes x with one of the norm's result."""
    problem, n = executable.problem, executable.configuration.batch_size
    operands = cache(partial(random_operands, problem, n))  # only drawn if the times are not known
    mean, inverse, weight, bias = torch.zeros(problem.c), *torch.ones(3, problem.c)

    def third() -> Tensor | None:
        return None if problem.operation is Operation.FORWARD else operands().y

    def apart() -> object:
        x = normalization.forward(operands().x, norm, mean, inverse, weight, bias)[0]
        return executable.run(x, operands().w, third())

    def together() -> object:
        prologue = Prologue(mean, inverse, weight, bias, norm.function, norm.slope)
        return normalizing.run(operands().x, operands().w, third(), None, prologue)

    what = f"{norm!r} of x: {problem!r}, {executable.configuration.micro_configs!r}, version {normalization.VERSION}"
    return timings.compared(what, apart, [together], _ROUNDS)[0]


def _gains_of_moments(convolutions: Sequence[TunedModule], config: Config, progress: Progress) -> list[bool]:
    """Return whether each convolution is faster if it computes the moments of y than the two by themselves."""
    gains: list[bool] = []
    if not convolutions:
        return gains
    with _timings(config, progress) as timings:
        for number, convolution in enumerate(convolutions):
            progress("measuring moments in convolutions", number / len(convolutions))
            known = convolution.choices.executables.values() if convolution.choices is not None else ()
            executables = [executable for executable in known if executable is not None and _is_able(executable)]
            comparisons = [_with_moments(executable, timings) for executable in executables]
            gains.append(bool(comparisons) and all(comparison.speedup > 1 for comparison in comparisons))
    return gains


def _is_able(executable: Executable) -> bool:
    return executable.problem.operation is Operation.FORWARD and executable.fuses_moments


def _with_moments(executable: Executable, timings: Timings) -> Comparison:
    """Compare a convolution that computes moments with one whose y is read once more for them."""
    problem, batch_size = executable.problem, executable.configuration.batch_size
    operands = cache(partial(random_operands, problem, batch_size))
    norm = Norm(0, 1e-5)

    def apart() -> object:
        return normalization.moments(executable.run(operands().x, operands().w, None), norm)

    def together() -> object:
        moments = zero_moments(problem.k)
        y = executable.run(operands().x, operands().w, None, moments)
        return y, moments_from(moments, problem.k, norm.eps)

    what = f"moments of y: {problem!r}, {executable.configuration.micro_configs!r}"
    return timings.compared(what, apart, [together], _ROUNDS)[0]


def _comparisons(calls: Sequence[GroupCall], config: Config, progress: Progress) -> dict[GroupCall, Comparison]:
    """Compare groups with PyTorch's operators, forward and backward; what is stored is not measured again."""
    comparisons: dict[GroupCall, Comparison] = {}
    if not calls:
        return comparisons
    with _timings(config, progress) as timings:
        for number, call in enumerate(calls):
            progress(f"measuring {call}, {tuple(call.shape)}", number / len(calls))
            by_operators, as_group = _steps(call)
            comparisons[call] = timings.compared(
                f"group {call!r}, version {normalization.VERSION}", by_operators, [as_group], _ROUNDS
            )[0]
    return comparisons


@contextmanager
def _timings(config: Config, progress: Progress) -> Iterator[Timings]:
    """Yield the timings of the config's database; the heap is kept meanwhile, unless the config says no."""
    as_in_use = nullcontext() if config.keep_heap is False else kept_heap()
    with as_in_use, machine_and_database(config) as (machine, database):
        yield Timings(machine, database, config, progress)


def _steps(call: GroupCall) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that run a call forward and backward on random operands: by PyTorch, and as a group."""
    channels = call.shape[1]

    def image() -> Tensor:
        return torch.empty_strided(call.shape, call.strides, dtype=call.dtype).normal_()

    def parameter(value: float) -> Tensor | None:
        return None if call.weight_dtype is None else torch.full((channels,), value, dtype=call.weight_dtype)

    x, dy, weight, bias = image(), image(), parameter(1.0), parameter(0.0)
    added = image() if call.has_addition else None
    operands = [operand.requires_grad_() for operand in (x, weight, bias, added) if operand is not None]
    running = (torch.zeros(channels), torch.ones(channels)) if call.norm.sets == 0 else None

    def by_operators() -> object:
        y = by_torch(call.norm, x, weight, bias, running, added, is_fixed=call.is_fixed)
        return torch.autograd.grad(y, operands, dy)

    choices, bound = GroupChoices(), BoundNorm(call.norm, call.is_fixed)
    if running is not None:
        bound = bound.with_operands(x, weight, running[0])

    def as_group() -> object:
        if call.is_fixed:
            mean, inverse = torch.zeros(channels), torch.ones(channels)
        else:
            mean, inverse = statistics_of(x.detach(), bound, running and (*running, 0.1))
        y = compute(Normalized(x, weight, bias, mean, inverse, bound, choices), added)
        return torch.autograd.grad(y, operands, dy)

    return by_operators, as_group
