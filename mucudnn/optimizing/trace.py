"""What a training step keeps: the values of its forward pass, when they are read, and what else is allocated.

A step is run with all that PyTorch keeps, once to time what computes the values, once to see its bytes.
"""

from __future__ import annotations

import gc
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mucudnn.core.values import grouped
from mucudnn.kernels.memory import mark, mark_gradient, peaks_between_marks
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.optimizing.segments import Part, parts_of
from mucudnn.optimizing.steps import Step
from mucudnn.running.keeping import free_concatenations, records
from mucudnn.running.tape import Call, Tape, Value, memory_of, recording
from mucudnn.running.workspace import release_workspaces
from mucudnn.solver import keeping as solver
from mucudnn.solver.keeping import Choice
from mucudnn.tuning.model_state import set_gradients

_MOST_READERS = 3  # of a value that may be dropped: others, such as the features of dense blocks, are kept


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A step as the solver sees it.

    names: of the operators that compute the values of a forward pass.
    values: those to choose for; numbers: of each, its index in the forward pass.
    rest_bytes: of a step where no value is read, so that nothing is to be chosen.
    segments_s: the time of the segments, which are computed again in any case.
    convolutions: names of the tuned ones, each with a value, by index, at which its workspace counts.
    """

    names: list[str]
    values: list[solver.Value]
    numbers: list[int]
    rest_bytes: int
    segments_s: float
    convolutions: list[tuple[str, int]]

    def choices(self, chosen: Sequence[Choice]) -> tuple[tuple[str, Choice], ...]:
        """Return the choices of all values of the forward pass; those that are not saved are computed each time."""
        choices = [Choice.EACH_TIME] * len(self.names)
        for number, choice in zip(self.numbers, chosen, strict=True):
            choices[number] = choice
        return tuple(zip(self.names, choices, strict=True))


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of a model, of which the memory is counted and traced.

    step: runs the step of the model that it is given.
    device_type: ``cpu`` or ``cuda``.
    """

    model: nn.Module
    step: Step
    device_type: str

    def peaks(self) -> list[int]:
        """Return the peaks of a step between marks, in bytes, beside the gradients of the parameters.

        The step begins without gradients. Raises any error of the step.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        set_gradients((parameter, None) for parameter in parameters)
        # Not after a gradient is accumulated: models with such hooks keep more.
        handles = [cast(Any, parameter).register_hook(partial(_mark_gradient, parameter)) for parameter in parameters]
        # What is kept between steps counts, too, and what is freed meanwhile must be of the step.
        torch.clear_autocast_cache()
        release_workspaces()
        gc.collect()
        try:
            return peaks_between_marks(lambda: self.step(self.model), self.device_type)
        finally:
            for handle in handles:
                handle.remove()

    def traced(self) -> tuple[StepTrace, list[Part]]:
        """Return what a step keeps, and the parts of the model that may run in micro-batches."""
        timer = _Timer(wall_clock(self.device_type))
        self._recorded(timer)
        choices = {name: getattr(module, "choices", None) for name, module in self.model.named_modules()}
        names = grouped((id(one), name) for name, one in choices.items() if one is not None)
        observer = _Observer(timer.times_s, names)
        with parts_of(self.model, observer) as parts:
            peaks = self._recorded(observer)
        return _simplified(observer.seen, observer.of_one, peaks, timer.segments_s), parts

    def _recorded(self, tape: Tape) -> list[int]:
        """Return the peaks between marks of a step, whose forward passes a tape records."""

        def begin(module: nn.Module, _: Any) -> None:
            if records(module):
                tape.__enter__()

        def end(_: nn.Module, arguments: Any, named: Any, result: Any) -> None:
            if recording() is tape:
                tape.__exit__(None, None, None)
                free_concatenations(result, (arguments, named))

        before = self.model.register_forward_pre_hook(begin, prepend=True)
        after = self.model.register_forward_hook(end, with_kwargs=True, always_call=True)
        try:
            return self.peaks()
        finally:
            before.remove()
            after.remove()


def _mark_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None and parameter.grad is None:  # else the gradient is added to it, and freed
        mark_gradient(gradient.nbytes)


@dataclass(slots=True)
class _Seen:
    """A value of a forward pass, as seen in a step.

    made, freed: the marks after it was computed and freed; -1 if it was not freed in the step.
    is_view: whether it shares the memory of what it is computed from.
    is_saved: whether autograd has kept it.
    uses: the marks at which the backward pass reads it.
    convolutions: names of the tuned modules that may compute it, all of those with the same choices.
    """

    name: str
    size_bytes: int
    time_s: float
    reads: list[int]
    made: int
    is_view: bool
    convolutions: Sequence[str]
    is_saved: bool = False
    freed: int = -1
    uses: list[int] = field(default_factory=list)


class _AllKept(Tape):  # type: ignore[no-untyped-call]
    """A tape that keeps what PyTorch keeps."""

    def note(self, results: Sequence[Any], name: str, call: Call) -> list[Value]:
        values = super().note(results, name, call)
        for value in values:
            value.call = None
        return values

    def pack(self, tensor: Tensor) -> Any:
        kept = super().pack(tensor)
        if isinstance(kept, Value):
            kept.keep(tensor)
        return kept


class _Timer(_AllKept):  # type: ignore[no-untyped-call]
    """A tape that times what computes the values.

    times_s: of the values, in their order.
    segments_s: of all segments.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.times_s: list[float] = []
        self.segments_s = 0.0
        self._time_s = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        begun_s = self.clock.now()
        with super().paused():
            yield
        self.segments_s += self.clock.now() - begun_s

    def run(self, func: Any, args: Any, named: Any) -> Any:
        begun_s = self.clock.now()
        result = super().run(func, args, named)
        self._time_s = self.clock.now() - begun_s
        return result

    def note(self, results: Sequence[Any], name: str, call: Call) -> list[Value]:
        values = super().note(results, name, call)
        self.times_s += [self._time_s] * len(values)
        return values

    def note_unseen(self, y: Tensor, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        begun_s = self.clock.now()
        with super().paused(), torch.no_grad():
            function(*arguments)
        self._time_s = self.clock.now() - begun_s
        super().note_unseen(y, name, function, arguments)


class _Observer(_AllKept):  # type: ignore[no-untyped-call]
    """A tape that notes when the values are read and freed.

    times_s: of what computes the values, in their order.
    convolutions: names of modules, by the identity of their choices.
    seen: the values of all forward passes of the step, of_one: how many the first one has.
    """

    def __init__(self, times_s: Sequence[float], convolutions: Mapping[int, Sequence[str]]) -> None:
        super().__init__()
        self.times_s, self.convolutions = times_s, convolutions
        self.seen: list[_Seen] = []
        self.marks = self.of_one = 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.of_one = self.of_one or len(self.seen)

    def mark(self) -> None:
        """Begin two intervals, in the first of which nothing is allocated: its peak is what is in use."""
        self.marks += 2
        mark()
        mark()

    def note(self, results: Sequence[Any], name: str, call: Call) -> list[Value]:
        reads = call.reads()
        memory = {memory_of(read.tensor) for read in reads if read.tensor is not None}
        values = super().note(results, name, call)
        is_convolution = name == "convolution"
        convolutions = self.convolutions.get(id(call.arguments[-1][-1]), ()) if is_convolution else ()
        self.mark()
        for value, tensor in ((self.value_of(tensor), tensor) for tensor in results if isinstance(tensor, Tensor)):
            if value in values:
                assert value is not None
                is_view = not call.is_in_place and memory_of(tensor) in memory
                time_s = self.times_s[value.index] if value.index < len(self.times_s) else 0.0
                indices = [read.index for read in reads if read.index >= 0]
                self.seen.append(_Seen(name, tensor.nbytes, time_s, indices, self.marks, is_view, convolutions))
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
        seen = self.seen[index]
        if not seen.is_view:
            self.marks += 1
            mark(seen.size_bytes)
        seen.freed = self.marks


def _simplified(of_all: list[_Seen], of_one: int, peaks: list[int], segments_s: float) -> StepTrace:
    """Return a step as the solver sees it: values for which there is a choice, in terms of each other.

    Views, and values that only one other is computed from, are computed with those that read them.

    of_all: the values of all forward passes in the step, which make the same choices for ``of_one`` values.
    """
    # Which values there is a choice for
    seen = of_all[:of_one]
    readers: list[list[int]] = [[] for _ in seen]
    for index, value in enumerate(seen):
        for read in dict.fromkeys(value.reads):
            readers[read].append(index)
    is_joined = [value.is_view or (not value.is_saved and len(readers[i]) <= 1) for i, value in enumerate(seen)]

    # What else is in use in each interval, and in the backward pass while each value is read
    kept = [0] * (len(peaks) + 1)  # bytes of the values for which there is a choice
    for number, value in enumerate(of_all):
        if not is_joined[number % of_one]:
            for interval in range(value.made, value.freed if value.freed >= 0 else len(peaks)):
                kept[interval] += value.size_bytes
    else_bytes = [peak - of_kept for peak, of_kept in zip(peaks, kept, strict=False)]
    highest = -1  # of the values that are read at an interval or later
    of_backward: dict[int, int] = {}
    last_forward = max((value.made for value in of_all), default=0)
    uses = {interval: index % of_one for index, value in enumerate(of_all) for interval in value.uses}
    first_uses = _first_uses(seen, readers)
    for interval in range(len(peaks) - 1, last_forward, -1):
        highest = max(highest, uses.get(interval, -1))
        of_backward[highest] = max(of_backward.get(highest, 0), else_bytes[interval])

    # The values, each with those that are computed with it
    numbers = [index for index in range(len(seen)) if not is_joined[index]]
    places = {index: place for place, index in enumerate(numbers)}
    values = []
    below = 0
    for index in numbers:
        value, joined = seen[index], _joined(seen, is_joined, index)
        reads = {read for reader in joined for read in seen[reader].reads} - joined
        first_use = first_uses[index]
        computing = 0
        if first_use >= 0:
            # The interval before the first use has what is in use then, the one before it the operator's temporaries.
            computing = else_bytes[first_use - 1] + _temporary_bytes(seen, joined, peaks)
        backward = max((size for at, size in of_backward.items() if below <= at <= index), default=0)
        following = seen[index + 1].made if index + 1 < len(seen) else 0
        forward = max(else_bytes[seen[below].made : max(following, value.made + 1)])
        below = index + 1
        values.append(
            solver.Value(
                size_bytes=value.size_bytes,
                time_s=sum(seen[reader].time_s for reader in joined),
                reads=tuple(sorted(places[read] for read in reads)),
                is_used=bool(value.uses),
                backward_bytes=max(backward, 0),
                forward_bytes=max(forward, 0),
                computing_bytes=max(computing, 0),
                may_be_dropped=len(readers[index]) <= _MOST_READERS,
            )
        )
    rest_bytes = of_backward.get(-1, 0) if numbers else max(peaks)
    convolutions = _convolutions(seen, numbers)
    return StepTrace([value.name for value in seen], values, numbers, rest_bytes, segments_s, convolutions)


def _convolutions(seen: list[_Seen], numbers: list[int]) -> list[tuple[str, int]]:
    """Return the tuned convolutions, each with the values at which its workspace counts.

    It is allocated after the value before the result, when the result is computed again, and when gradients are
    computed from what the convolution reads.

    numbers: of the values for which there is a choice.
    """
    convolutions = []
    for index, value in enumerate(seen):
        if value.convolutions and numbers:
            around = (max(0, index - 1), index, *value.reads)
            places = {min(bisect_left(numbers, number), len(numbers) - 1) for number in around}
            convolutions += [(name, place) for name in value.convolutions for place in sorted(places)]
    return convolutions


def _first_uses(seen: list[_Seen], readers: list[list[int]]) -> list[int]:
    """Return the interval in which the backward pass first needs each value; -1 for none.

    That is for its own gradient, or else to compute again what reads it.
    """
    first = [-1] * len(seen)
    for index in reversed(range(len(seen))):
        of_readers = [first[reader] for reader in readers[index] if first[reader] >= 0]
        first[index] = min(seen[index].uses or of_readers, default=-1)
    return first


def _joined(seen: list[_Seen], is_joined: list[bool], index: int) -> set[int]:
    """Return a value and those that are computed with it."""
    joined, left = {index}, [index]
    while left:
        more = {read for read in seen[left.pop()].reads if is_joined[read]} - joined
        joined |= more
        left += more
    return joined


def _temporary_bytes(seen: list[_Seen], joined: set[int], peaks: list[int]) -> int:
    """Return what computing a value, the last of those that are joined, needs at its peak beside the value.

    Operators allocate temporary memory, and the other ones are there until the last that reads them.
    """
    last_reader = {read: reader for reader in sorted(joined) for read in seen[reader].reads if read in joined}
    most = in_use = 0
    for index in sorted(joined):
        value = seen[index]
        in_use += value.size_bytes * (index in last_reader and not value.is_view)
        most = max(most, in_use + peaks[value.made - 2] - peaks[value.made - 1])
        read = [read for read, reader in last_reader.items() if reader == index]
        in_use -= sum(seen[one].size_bytes for one in read if not seen[one].is_view)
    return most
