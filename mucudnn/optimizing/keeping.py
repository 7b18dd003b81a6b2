"""A model whose training steps stay within a budget of memory: what its forward passes keep is chosen and counted.

A step is run once, with all that PyTorch keeps, to see the values of the forward pass, when the backward pass reads
them, and what else is allocated meanwhile. ``solver/keeping.py`` chooses. Then steps are counted: what was predicted
too low is corrected, and chosen again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.records import Comparison
from mucudnn.core.terminal import Progress
from mucudnn.core.values import exact_bytes, format_bytes, format_seconds
from mucudnn.kernels.memory import mark, mark_gradient, peaks_between_marks
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.measuring.turns import Rounds, in_turns
from mucudnn.optimizing.segments import Part, chosen_parts, mixing_parts, parts_of
from mucudnn.optimizing.steps import Step
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.dispatcher import untouched
from mucudnn.running.keeping import KeepingModule, make_keeping
from mucudnn.running.modules import TunedModule, running_torchs_own
from mucudnn.running.segments import SEGMENT, Segment, set_segments
from mucudnn.running.tape import Call, Tape, Value
from mucudnn.solver import keeping as solver
from mucudnn.solver.keeping import Choice
from mucudnn.tuning.choose import with_noise
from mucudnn.tuning.model_state import OwnStep, set_gradients, undisturbed

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
    predicted_s: the predicted time of a step.
    segments: parts of the model that run in micro-batches.
    """

    choices: tuple[tuple[str, Choice], ...]
    budget_bytes: int
    predicted_bytes: int
    time_s: float
    all_bytes: int
    peak_bytes: int = 0
    step: Comparison | None = None
    predicted_s: float = 0.0
    segments: tuple[Segment, ...] = ()

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
        parts += map(str, self.segments)
        if self.step is not None:
            parts.append(
                f"a step takes {format_seconds(self.step.time_s)}, predicted {format_seconds(self.predicted_s)}"
            )
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
    step = step or OwnStep(sample_input)
    device_type = device_of_convolutions(model).type
    module = make_keeping(model)
    vars(module)["keeping"] = None
    clock = wall_clock(device_type)
    with undisturbed(model):
        progress("tracing what a step keeps", 1.0)
        set_segments(model, ())
        model_of_step = Stepping(model, step, device_type)
        all_bytes = max(model_of_step.peaks())
        keeping = Keeping((), budget_bytes, all_bytes, 0.0, all_bytes, all_bytes)
        if all_bytes > budget_bytes:
            keeping = _chosen(module, model_of_step, budget_bytes, all_bytes)
        progress("comparing steps within the budget", 1.0)
        compared, all_s = _compared(module, keeping, step, clock)
        vars(module)["keeping"] = replace(keeping, step=compared, predicted_s=all_s + keeping.time_s)
    set_segments(model, keeping.segments)


def _chosen(module: KeepingModule, stepping: Stepping, budget_bytes: int, all_bytes: int) -> Keeping:
    """Return what forward passes keep within a budget, counted, and put it in.

    Segments in micro-batches are estimated first; where that was too low, for a smaller budget, and for the least.
    """
    whole, parts = stepping.traced(with_parts=True)
    traced, before, mixing = whole, list[Part](), set[Part]()

    def counted(solved: solver.Keeping) -> Keeping:
        keeping = Keeping(
            choices=traced.choices(solved.choices),
            budget_bytes=budget_bytes,
            predicted_bytes=solved.peak_bytes,
            time_s=solved.time_s + traced.time_s,
            all_bytes=all_bytes,
            segments=tuple(part.segment for part in chosen),
        )
        vars(module)["keeping"] = keeping
        return replace(keeping, peak_bytes=max(stepping.peaks()))

    for target_bytes in (budget_bytes, int(0.8 * budget_bytes), 0):
        while True:
            able = [part for part in parts if part not in mixing]
            chosen = chosen_parts(whole.values, whole.numbers, able, target_bytes)
            found = [] if chosen == before else mixing_parts(module, stepping.step, chosen)
            if not found:
                break
            mixing |= {part for part in parts for other in found if part.covers(other)}
        if chosen != before:
            vars(module)["keeping"] = None
            set_segments(module, [part.segment for part in chosen])
            traced, _ = stepping.traced()
        elif target_bytes != budget_bytes:
            continue
        before, allowed_bytes = chosen, budget_bytes
        for _ in range(_COUNTS):
            solved = solver.least_time(traced.values, allowed_bytes)
            if solved is None:
                break
            keeping = counted(solved)
            if keeping.peak_bytes <= budget_bytes:
                return keeping
            allowed_bytes -= keeping.peak_bytes - budget_bytes
    keeping = counted(solver.least_memory(traced.values))
    if keeping.peak_bytes > budget_bytes:
        vars(module)["keeping"] = None
        set_segments(module, ())
        raise InfeasibleError(
            f"memory_budget is {exact_bytes(budget_bytes)}; a step of this model needs at least "
            f"{exact_bytes(keeping.peak_bytes)} beside parameters, gradients and the batch: give that, or a "
            "smaller batch"
        )
    return keeping


@dataclass(frozen=True, slots=True)
class Stepping:
    """A model with its step."""

    model: nn.Module
    step: Step
    device_type: str

    def peaks(self) -> list[int]:
        """Return the peaks of a step between marks, beside the gradients of the parameters."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        set_gradients((parameter, None) for parameter in parameters)
        hooked = (cast(Any, parameter).register_post_accumulate_grad_hook for parameter in parameters)
        handles = [register(_mark_gradient) for register in hooked]
        try:
            return peaks_between_marks(lambda: self.step(self.model), self.device_type)
        finally:
            for handle in handles:
                handle.remove()

    def traced(self, *, with_parts: bool = False) -> tuple[_Traced, list[Part]]:
        """Return what a step keeps, and the parts of the model that may run in micro-batches."""
        timer = _Timer(wall_clock(self.device_type))
        self._recorded(timer)  # in which libraries allocate what they keep
        observer = _Observer(timer.times_s)
        if not with_parts:
            return _simplified(observer.seen, self._recorded(observer)), []
        with parts_of(self.model, observer) as parts:
            peaks = self._recorded(observer)
        return _simplified(observer.seen, peaks), parts

    def _recorded(self, tape: Tape) -> list[int]:
        """Return the peaks between marks of a step, whose forward pass a tape records."""

        def begin(module: nn.Module, arguments: Any) -> None:
            tape.__enter__()

        before = self.model.register_forward_pre_hook(begin, prepend=True)
        after = self.model.register_forward_hook(lambda *_: tape.__exit__(None, None, None), always_call=True)
        try:
            return self.peaks()
        finally:
            before.remove()
            after.remove()


def _compared(model: KeepingModule, keeping: Keeping, step: Step, clock: Clock) -> tuple[Comparison, float]:
    """Compare steps within the budget with those of PyTorch's operators, which keep all.

    Return also the time of steps by the model's own operators that keep all.
    """
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
    for of_round in in_turns([by_torch, lambda: timed(keeping), lambda: timed(None)]):
        times.append(of_round)
        if _ROUNDS.is_enough(len(times), sum(map(sum, times))):
            break
    torchs_s, kept_s, all_s = zip(*times, strict=True)
    return Comparison.of(torchs_s, kept_s), median(all_s)


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


class _Keeper(Tape):  # type: ignore[no-untyped-call]
    """A tape that keeps what PyTorch keeps."""

    def note(self, results: Sequence[Any], name: str, call: Call) -> list[Value]:
        values = super().note(results, name, call)
        for value in values:
            value.call = None
        return values

    def pack(self, tensor: Tensor) -> Any:
        kept = super().pack(tensor)
        if isinstance(kept, Value):
            kept.store(tensor)
        return kept


class _Timer(_Keeper):  # type: ignore[no-untyped-call]
    """A tape that times what computes the values.

    times_s: of the values, in their order.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.times_s: list[float] = []
        self._time_s = 0.0

    def call(self, func: Any, args: Any, named: Any) -> Any:
        begun_s = self.clock.now()
        result = super().call(func, args, named)
        self._time_s = self.clock.now() - begun_s
        return result

    def note(self, results: Sequence[Any], name: str, call: Call) -> list[Value]:
        values = super().note(results, name, call)
        self.times_s += [self._time_s] * len(values)
        return values

    def note_unseen(self, y: Tensor, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        begun_s = self.clock.now()
        with torch.no_grad():
            function(*arguments)
        self._time_s = self.clock.now() - begun_s
        super().note_unseen(y, name, function, arguments)


class _Observer(_Keeper):  # type: ignore[no-untyped-call]
    """A tape that notes when the values are read and freed.

    times_s: of what computes the values, in their order.
    """

    def __init__(self, times_s: Sequence[float]) -> None:
        super().__init__()
        self.times_s = times_s
        self.seen: list[_Seen] = []
        self.marks = 0

    def mark(self) -> None:
        self.marks += 1
        mark()

    def note(self, results: Sequence[Any], name: str, call: Call) -> list[Value]:
        reads = call.reads()
        memory = {_memory(read.tensor) for read in reads if read.tensor is not None}
        values = super().note(results, name, call)
        self.mark()
        for value, tensor in ((self.value_of(tensor), tensor) for tensor in results if isinstance(tensor, Tensor)):
            if value in values:
                assert value is not None
                is_view = not call.is_in_place and _memory(tensor) in memory
                time_s = self.times_s[value.index] if value.index < len(self.times_s) else 0.0
                indices = [read.index for read in reads if read.index >= 0]
                self.seen.append(_Seen(name, tensor.nbytes, time_s, indices, self.marks, is_view))
                weakref.finalize(value, self._freed, value.index)
        return values

    def pack(self, tensor: Tensor) -> Any:
        kept = super().pack(tensor)
        if isinstance(kept, Value):
            self.seen[kept.index].is_saved = True
        return kept

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Value):
            self.mark()
            self.seen[kept.index].uses.append(self.marks)
        return super().unpack(kept)

    def _freed(self, index: int) -> None:
        self.seen[index].freed = self.marks


def _mark_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        mark_gradient(parameter.grad.nbytes)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class _Traced:
    """A step as the solver sees it.

    values: those to choose for; numbers: of each, its index in the forward pass.
    time_s: of the segments, which are computed again in any case.
    """

    names: list[str]
    values: list[solver.Value]
    numbers: list[int]
    peak_bytes: int
    time_s: float

    def choices(self, chosen: Sequence[Choice]) -> tuple[tuple[str, Choice], ...]:
        """Return the choices of all values of the forward pass; those that are not saved are computed each time."""
        choices = [Choice.EACH_TIME] * len(self.names)
        for number, choice in zip(self.numbers, chosen, strict=True):
            choices[number] = choice
        return tuple(zip(self.names, choices, strict=True))


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
    segments_s = sum(value.time_s for value in seen if value.name == SEGMENT)
    return _Traced([value.name for value in seen], values, numbers, max(peaks), segments_s)


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
