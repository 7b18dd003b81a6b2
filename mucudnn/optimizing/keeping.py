"""A model whose training steps stay within a budget of memory: what its forward passes keep is chosen and counted.

A step is run once, with all that PyTorch keeps, to see the values of the forward pass, when the backward pass reads
them, and what else is allocated meanwhile. ``solver/keeping.py`` chooses. Then steps are counted: what was predicted
too low is corrected, and chosen again.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.records import Comparison
from mucudnn.core.terminal import Progress
from mucudnn.core.values import exact_bytes, format_bytes, format_seconds
from mucudnn.kernels.memory import mark, peaks_between_marks
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.measuring.turns import Rounds, in_turns
from mucudnn.optimizing.steps import Step
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.dispatcher import untouched
from mucudnn.running.keeping import KeepingModule, make_keeping
from mucudnn.running.modules import TunedModule, running_torchs_own
from mucudnn.running.tape import Call, Tape, Value
from mucudnn.running.workspace import release_workspaces
from mucudnn.solver import keeping as solver
from mucudnn.solver.keeping import Choice
from mucudnn.tuning.choose import with_noise
from mucudnn.tuning.model_state import OwnStep, undisturbed

_COUNTS = 4  # steps that are counted to correct the prediction
_MOST_READERS = 3  # of a value that may be dropped: others, such as the features of dense blocks, are kept
_ROUNDS = Rounds(3, 9, 10.0)  # of steps within the budget and PyTorch's


@dataclass(frozen=True, slots=True)
class Keeping:
    """What the forward passes of a model keep. Prints as one line.

    choices: of the values of a forward pass, each with the operator that computes it; empty to keep all that PyTorch
        keeps.
    budget_bytes: of a step beside parameters, gradients and the input.
    predicted_bytes, peak_bytes: what was predicted and counted.
    time_s: of what is computed again.
    all_bytes: the peak of a step that keeps all that PyTorch keeps.
    step: the time of a step, compared with PyTorch's operators without a budget.
    """

    choices: tuple[tuple[str, Choice], ...]
    budget_bytes: int
    predicted_bytes: int
    time_s: float
    all_bytes: int
    peak_bytes: int = 0
    step: Comparison | None = None

    def __str__(self) -> str:
        kept = sum(choice is Choice.KEPT for _, choice in self.choices)
        parts = [f"steps within {format_bytes(self.budget_bytes)}: peak {format_bytes(self.peak_bytes)}"]
        if self.choices:
            parts[0] += (
                f", predicted {format_bytes(self.predicted_bytes)}, {format_bytes(self.all_bytes)} if all is kept"
            )
            again = f"the others computed again in {format_seconds(self.time_s)}"
            parts.append(f"{kept} of {len(self.choices)} tensors are kept, {again}")
        else:
            parts.append("all is kept")
        if self.step is not None:
            parts.append(f"speedup over PyTorch without a budget {with_noise(self.step)}")
        return "; ".join(parts)


def keep_within(model: nn.Module, sample_input: Any, config: Config, step: Step | None, progress: Progress) -> None:
    """Choose what forward passes of a model in training keep, so that a step stays within ``config.memory_budget``.

    The budget is for what a step allocates beside the gradients of the parameters.

    step: the user's step, or None for a forward and backward pass on the sample input.

    Raises ``InfeasibleError`` with the least budget; ``InvalidInputError`` if the class of the model cannot be changed;
    and any error of the step.
    """
    budget_bytes = config.memory_budget_bytes
    assert budget_bytes is not None
    step = step or OwnStep(sample_input, keeps_gradients=True)
    device_type = device_of_convolutions(model).type
    module = make_keeping(model)
    vars(module)["keeping"] = None
    with undisturbed(model):
        progress("tracing what a step keeps", 1.0)
        first_bytes = max(_peaks(model, step, device_type))  # in which libraries allocate what they keep
        traced = _traced(model, step, device_type)
        all_bytes = min(first_bytes, traced.peak_bytes)  # the observer may keep parts without gradients for longer

        def counted(solved: solver.Keeping) -> Keeping:
            keeping = Keeping(
                choices=traced.choices(solved.choices),
                budget_bytes=budget_bytes,
                predicted_bytes=solved.peak_bytes,
                time_s=solver.recomputation_s(traced.values, solved.choices),
                all_bytes=all_bytes,
            )
            vars(module)["keeping"] = keeping
            return replace(keeping, peak_bytes=max(_peaks(model, step, device_type)))

        keeping, allowed_bytes = None, budget_bytes
        if all_bytes <= budget_bytes:
            keeping = Keeping((), budget_bytes, all_bytes, 0.0, all_bytes, all_bytes)
        for _ in range(_COUNTS if keeping is None else 0):
            solved = solver.least_time(traced.values, allowed_bytes)
            keeping = None if solved is None else counted(solved)
            if keeping is None or keeping.peak_bytes <= budget_bytes:
                break
            allowed_bytes -= keeping.peak_bytes - budget_bytes
        if keeping is None or keeping.peak_bytes > budget_bytes:
            # By bytes instead of seconds, so that the least budget is the same each time.
            untimed = [replace(value, time_s=float(value.size_bytes)) for value in traced.values]
            keeping = counted(solver.least_memory(untimed))
        if keeping.peak_bytes > budget_bytes:
            vars(module)["keeping"] = None
            least_bytes = min(keeping.peak_bytes, all_bytes)
            raise InfeasibleError(
                f"memory_budget is {exact_bytes(budget_bytes)}; a step of this model needs at least "
                f"{exact_bytes(least_bytes)} beside parameters, gradients and the batch: give that, or a "
                "smaller batch"
            )
        progress("comparing steps within the budget", 1.0)
        vars(module)["keeping"] = replace(keeping, step=_compared(module, keeping, step, wall_clock(device_type)))


def _compared(model: KeepingModule, keeping: Keeping, step: Step, clock: Clock) -> Comparison:
    """Compare steps within the budget with those of PyTorch's operators, which keep all."""
    tuned = [module for module in model.modules() if isinstance(module, TunedModule)]

    def timed(kept: Keeping | None) -> float:
        vars(model)["keeping"] = kept
        begun_s = clock.now()
        step(model)
        return clock.now() - begun_s

    def by_torch() -> float:
        with running_torchs_own(tuned), untouched:
            return timed(None)

    times: list[list[float]] = []
    for of_round in in_turns([by_torch, lambda: timed(keeping)]):
        times.append(of_round)
        if _ROUNDS.is_enough(len(times), sum(map(sum, times))):
            break
    return Comparison.of(*zip(*times, strict=True))


def _peaks(model: nn.Module, step: Step, device_type: str) -> list[int]:
    """Return the peaks of a step between marks, beside the gradients of the parameters."""
    for parameter in model.parameters():
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    # What is kept between steps counts, too, and what is freed meanwhile must be of the step.
    torch.clear_autocast_cache()
    release_workspaces()
    gc.collect()
    return peaks_between_marks(lambda: step(model), device_type)


@dataclass(slots=True)
class _Seen:
    """A value of a forward pass, as seen in a step.

    made, freed: the marks after it was computed and freed; -1 if it was not freed in the step.
    is_view: whether it shares the memory of what it is computed from.
    is_saved: whether autograd has kept it.
    uses: the marks at which the backward pass reads it.
    """

    name: str
    size_bytes: int
    time_s: float
    reads: list[int]
    made: int
    is_view: bool
    is_saved: bool = False
    freed: int = -1
    uses: list[int] = field(default_factory=list)


class _Observer(Tape):  # type: ignore[no-untyped-call]
    """A tape that keeps what PyTorch keeps, and notes when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[_Seen] = []
        self.marks = 0
        self.begun_s = perf_counter()

    def mark(self) -> None:
        self.marks += 1
        mark()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.begun_s = perf_counter()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note(self, results: Sequence[Any], name: str, call: Call) -> None:
        time_s = perf_counter() - self.begun_s
        reads = [value for value in call.reads() if value.index >= 0]
        known = self.count
        super().note(results, name, call)
        self.mark()
        for tensor in results:
            value = self.value_of(tensor) if isinstance(tensor, Tensor) else None
            if value is None or value.index < known:
                continue
            value.call = None
            is_view = not call.is_in_place and any(
                read.tensor is not None and _memory(read.tensor) == _memory(tensor) for read in reads
            )
            indices = [read.index for read in reads]
            self.seen.append(_Seen(name, tensor.nbytes, time_s, indices, self.marks, is_view))
            weakref.finalize(value, self._freed, value.index)

    def pack(self, tensor: Tensor) -> Any:
        kept = super().pack(tensor)
        if isinstance(kept, Value):
            kept.store(tensor)
            self.seen[kept.index].is_saved = True
        return kept

    def unpack(self, kept: Any) -> Tensor:
        self.mark()
        if isinstance(kept, Value):
            self.seen[kept.index].uses.append(self.marks)
        return super().unpack(kept)

    def _freed(self, index: int) -> None:
        self.seen[index].freed = self.marks


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class _Traced:
    """A step as the solver sees it.

    values: those to choose for; numbers: of each, its index in the forward pass.
    """

    names: list[str]
    values: list[solver.Value]
    numbers: list[int]
    peak_bytes: int

    def choices(self, chosen: Sequence[Choice]) -> tuple[tuple[str, Choice], ...]:
        """Return the choices of all values of the forward pass; those that are not saved are computed each time."""
        choices = [Choice.EACH_TIME] * len(self.names)
        for number, choice in zip(self.numbers, chosen, strict=True):
            choices[number] = choice
        return tuple(zip(self.names, choices, strict=True))


def _traced(model: nn.Module, step: Step, device_type: str) -> _Traced:
    """Run a step of the model, to see what it keeps and allocates."""
    observer = _Observer()

    def observed(module: nn.Module, arguments: Any) -> None:
        observer.__enter__()

    before = model.register_forward_pre_hook(observed)
    after = model.register_forward_hook(lambda *_: observer.__exit__(None, None, None), always_call=True)
    try:
        peaks = _peaks(model, step, device_type)
    finally:
        before.remove()
        after.remove()
    return _simplified(observer.seen, peaks)


def _simplified(seen: list[_Seen], peaks: list[int]) -> _Traced:
    """Return the values for which there is a choice, in terms of each other.

    Views, and values that only one other is computed from, are computed with those that read them.
    """
    readers: list[list[int]] = [[] for _ in seen]
    for index, value in enumerate(seen):
        for read in dict.fromkeys(value.reads):
            readers[read].append(index)
    is_joined = [value.is_view or (not value.is_saved and len(readers[i]) <= 1) for i, value in enumerate(seen)]
    kept = [0] * (len(peaks) + 1)  # bytes of the saved values at each mark
    for value in seen:
        if value.is_saved and not value.is_view:
            for interval in range(value.made, value.freed if value.freed >= 0 else len(peaks)):
                kept[interval] += value.size_bytes
    else_bytes = [peak - of_kept for peak, of_kept in zip(peaks, kept, strict=False)]
    highest = -1  # of the values that are read at an interval or later
    of_backward: dict[int, int] = {}
    last_forward = max((value.made for value in seen), default=0)
    uses = {interval: index for index, value in enumerate(seen) for interval in value.uses}
    for interval in range(len(peaks) - 1, last_forward, -1):
        highest = max(highest, uses.get(interval, -1))
        of_backward[highest] = max(of_backward.get(highest, 0), else_bytes[interval])
    numbers = [index for index in range(len(seen)) if not is_joined[index]]
    places = {index: place for place, index in enumerate(numbers)}
    values = []
    below = 0
    for index in numbers:
        reads, time_s = _joined(seen, is_joined, index)
        backward = max((size for at, size in of_backward.items() if below <= at <= index), default=0)
        forward = max(else_bytes[seen[k].made] for k in range(below, index + 1))
        below = index + 1
        value = seen[index]
        values.append(
            solver.Value(
                size_bytes=value.size_bytes,
                time_s=time_s,
                reads=tuple(sorted(places[read] for read in reads)),
                is_used=bool(value.uses),
                backward_bytes=max(backward, 0),
                forward_bytes=max(forward, 0),
                may_be_dropped=len(readers[index]) <= _MOST_READERS,
            )
        )
    return _Traced([value.name for value in seen], values, numbers, max(peaks))


def _joined(seen: list[_Seen], is_joined: list[bool], index: int) -> tuple[set[int], float]:
    """Return from which values for which there is a choice a value is computed, and how long that takes."""
    reads, time_s = set[int](), seen[index].time_s
    for read in seen[index].reads:
        if is_joined[read]:
            more, more_s = _joined(seen, is_joined, read)
            reads |= more
            time_s += more_s
        else:
            reads.add(read)
    return reads, time_s
