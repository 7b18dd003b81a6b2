"""Programs: a schedule's steps, recorded in its first call and run in later ones, mostly by one call of C++."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from mucudnn.graph import steps
from mucudnn.graph.convolution import Convolution
from mucudnn.graph.operators import Band, Barrier, Input, Moments, Ref
from mucudnn.graph.sharing import unshared
from mucudnn.kernels.compiled.library import ProgramStep
from mucudnn.solver.bands import Segment

if TYPE_CHECKING:
    from mucudnn.graph.schedule import Schedule

_NULL, _ARENA, _FIRST_VALUE = range(3)  # entries of the table of addresses; then one for each operator
_Item: TypeAlias = Callable[["Call"], object]


class Call(dict[int, Any]):
    """One call of a schedule: the results that are alive by index, and the table of their addresses."""

    def __init__(self, schedule: Schedule, leaves: Sequence[Any], arena: Tensor) -> None:
        super().__init__()
        self.schedule, self.leaves, self.arena = schedule, leaves, arena
        self.bases = (ctypes.c_void_p * (len(schedule.operators) + _FIRST_VALUE))()
        self.bases[_ARENA] = self.arena.data_ptr()

    def __setitem__(self, index: int, value: Any) -> None:
        super().__setitem__(index, value)
        if isinstance(value, Tensor):
            self.bases[index + _FIRST_VALUE] = value.data_ptr()

    def __missing__(self, index: int) -> Tensor:
        """Return the view of a result in the arena that is needed as a whole."""
        return self.schedule.whole[index].view(self.arena, self.schedule.operators[index])

    def results(self) -> Any:
        captured = self.schedule.captured
        values = [self[one.index] if isinstance(one, Ref) else one for one in captured.results]
        taken = {self.arena.untyped_storage().data_ptr(), *self.schedule.own_memory}
        return captured.unflatten(unshared(values, captured.views, self.leaves, taken))


@dataclass
class Program:
    """The items of a schedule's calls, for arguments of the same strides and the same number of threads.

    items: in order; each does something in a call. owners: for each item the index of the operator to which it belongs,
    of the last if it runs steps of several. kept: arrays to which items refer.
    """

    items: list[_Item] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def run(self, call: Call) -> None:
        for item in self.items:
            item(call)

    def timed(self, call: Call) -> dict[int, float]:
        """Run, and return the seconds that each item took, added by owner."""
        found: dict[int, float] = {}
        for item, owner in zip(self.items, self.owners, strict=True):
            start = time.perf_counter()
            item(call)
            found[owner] = found.get(owner, 0.0) + time.perf_counter() - start
        return found


def record(call: Call, *, joins: bool = True) -> Program:
    """Run a call, and return the program that repeats it. joins: whether operators are run together where possible."""
    recorder = _Recorder(call, joins=joins)
    recorder.make_results()
    for number, segment in enumerate(call.schedule.plan.segments):
        recorder.run_segment(number, segment)
    recorder.flush()
    return recorder.program


class _Recorder:
    """Runs the steps of a schedule, and records them."""

    def __init__(self, call: Call, *, joins: bool) -> None:
        self.call, self.schedule, self.joins = call, call.schedule, joins
        self.program, self.owner = Program(), 0
        self.runs_cpp = self.schedule.captured.device.type == "cpu" and steps.is_available()
        self.steps: list[ProgramStep] = []  # not yet in the program

    def make_results(self) -> None:
        for index in self.schedule.captured.direct_results:
            self._do(partial(_make_result, index=index))

    def run_segment(self, number: int, segment: Segment) -> None:
        schedule = self.schedule
        self._belongs_to(segment.start)
        first = schedule.operators[segment.start]
        if isinstance(first, (Input, Barrier)):
            self._do(partial(_take_input if isinstance(first, Input) else _run_barrier, index=segment.start))
        else:
            running = _Running(schedule, number, segment)
            for index, item in running.beginning():
                self._belongs_to(index)
                self._do(item)
            for start in range(0, schedule.captured.samples, segment.cut.samples):
                samples = slice(start, min(start + segment.cut.samples, schedule.captured.samples))
                for k in range(segment.cut.bands):
                    for index in range(segment.start, segment.stop):
                        self._run_band(running, index, k, samples)
        ended = [index for index in self.call if schedule.graph.last_use[index] < segment.stop]
        if ended:
            self._do(partial(_free, indices=ended))

    def _run_band(self, running: _Running, index: int, k: int, samples: slice) -> None:
        self._belongs_to(index)
        for rows_of in (running.taken, partial(running.band, samples=samples), running.left):
            made = rows_of(self.call, index, k)
            if made is None:
                continue
            own = running.steps_of(self.call, index, made) if self.runs_cpp else []
            if own:
                self._run_steps(own)
            else:
                self._do(partial(running.compute, rows_of=rows_of, index=index, k=k))

    def _belongs_to(self, index: int) -> None:
        if not self.joins:
            self.flush()
        self.owner = index

    def _do(self, item: _Item) -> None:
        self.flush()
        item(self.call)
        self._add(item)

    def _add(self, item: _Item) -> None:
        self.program.items.append(item)
        self.program.owners.append(self.owner)

    def _run_steps(self, made: list[ProgramStep]) -> None:
        for step in made:
            for place in steps.places(step):
                place.base, place.offset = self._relative(place.offset)
            self.program.kept += getattr(step, "kept", ())
        steps.run_steps(made, self.call.bases)
        self.steps += made

    def _relative(self, address: int) -> tuple[int, int]:
        """Return the entry of the table of addresses, and the bytes behind it, of an address."""
        arena = self.call.arena
        if 0 <= address - arena.data_ptr() < arena.nbytes:
            return _ARENA, address - arena.data_ptr()
        for index, value in self.call.items():
            if isinstance(value, Tensor) and 0 <= address - value.data_ptr() < _extent_bytes(value):
                return index + _FIRST_VALUE, address - value.data_ptr()
        return _NULL, address

    def flush(self) -> None:
        """Add the steps so far to the program, as one item."""
        if self.steps:
            array = steps.array_of(self.steps)
            self.program.kept.append(array)
            self._add(partial(_run_array, address=ctypes.addressof(array), count=len(array)))
            self.steps = []


def _extent_bytes(value: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.itemsize if value.numel() else 0


def _run_array(call: Call, address: int, count: int) -> None:
    steps.run_array(address, count, call.bases)


def _take_input(call: Call, index: int) -> None:
    call[index] = call.leaves[call.schedule.operators[index].number]  # type: ignore[attr-defined]


def _run_barrier(call: Call, index: int) -> None:
    barrier = call.schedule.operators[index]
    assert isinstance(barrier, Barrier)
    call[index] = barrier.call(call.__getitem__)


def _make_result(call: Call, index: int) -> None:
    one, memory_format = call.schedule.operators[index], call.schedule.captured.direct_results[index]
    call[index] = torch.empty(one.shape, dtype=one.dtype, device=one.device, memory_format=memory_format)


def _make_sums(call: Call, index: int) -> None:
    one = call.schedule.operators[index]
    assert isinstance(one, Moments)
    call[index] = one.new_result()


def _free(call: Call, indices: Sequence[int]) -> None:
    for index in indices:
        del call[index]


_Rows: TypeAlias = "Band | tuple[Tensor, Tensor]"  # what an operator computes, or a copy: to, from


class _Running:
    """A segment that runs. Methods with ``index`` and ``k`` return what is done for an operator in band k, or None."""

    def __init__(self, schedule: Schedule, number: int, segment: Segment) -> None:
        self.schedule, self.number, self.segment = schedule, number, segment
        self.layout, self.ranges = schedule.layouts[number], schedule.ranges[number]
        self.start = schedule.starts[number]

    def beginning(self) -> Iterator[tuple[int, _Item]]:
        """Yield what makes sums over rows, and prepares filters that are not kept, by index of the operator."""
        for index in range(self.segment.start, self.segment.stop):
            one = self.schedule.operators[index]
            if isinstance(one, Moments):
                yield index, partial(_make_sums, index=index)
            if isinstance(one, Convolution) and one.algorithm(self.segment.cut) is not None and not one.keeps:
                yield index, partial(self._prepared, index=index)

    def _prepared(self, call: Call, index: int) -> Tensor:
        """Prepare a filter, unless that was done in an earlier call."""
        one = self.schedule.operators[index]
        assert isinstance(one, Convolution)
        algorithm = one.algorithm(self.segment.cut)
        assert algorithm is not None
        offset = self.start + self.layout.prepared[index]
        return one.prepared(algorithm, call.arena[offset : offset + one.prepared_bytes(algorithm)])

    def _addresses(self, call: Call, index: int) -> tuple[int, int]:
        """Return where the prepared filter and the scratch buffer of a convolution are."""
        one, start = self.schedule.operators[index], call.arena.data_ptr() + self.start
        keeps = isinstance(one, Convolution) and one.keeps
        prepared = self._prepared(call, index).data_ptr() if keeps else start + self.layout.prepared[index]
        return prepared, start + self.layout.scratch[index]

    def _held(self, call: Call, index: int) -> Tensor | None:
        place = self.layout.bands.get(index)
        return None if place is None else place.view(call.arena[self.start :], self.schedule.operators[index])

    def _kept(self, call: Call, index: int) -> Tensor:
        return self.layout.kept[index].view(call.arena[self.start :], self.schedule.operators[index])

    def taken(self, call: Call, index: int, k: int) -> tuple[Tensor, Tensor] | None:
        """Return where rows that an earlier band computed go, and these rows."""
        low, new = int(self.ranges[index].low[k]), int(self.ranges[index].new[k])
        held = self._held(call, index)
        if held is None or new <= low:
            return None
        return held[:, :, : new - low], self._kept(call, index)[:, :, : new - low]

    def left(self, call: Call, index: int, k: int) -> tuple[Tensor, Tensor] | None:
        """Return where rows that the next band needs are kept, and these rows."""
        if index not in self.layout.kept or k + 1 == self.segment.cut.bands:
            return None
        rows = self.ranges[index]
        low, first, until = int(rows.low[k]), int(rows.low[k + 1]), int(rows.new[k + 1])
        held = self._held(call, index)
        if until <= first or held is None:
            return None
        return self._kept(call, index)[:, :, : until - first], held[:, :, first - low : until - low]

    def band(self, call: Call, index: int, k: int, samples: slice) -> Band | None:
        """Return the operands of an operator."""
        one, rows = self.schedule.operators[index], self.ranges[index]
        low, new, high = int(rows.low[k]), int(rows.new[k]), int(rows.high[k])
        if high <= new:
            return None
        count, xs, starts = samples.stop - samples.start, [], []
        for position, source in enumerate(one.sources):
            first, last = self.schedule.read(index, position, new, high, self.segment.cut)
            held = self._held(call, source)
            if held is not None:
                offset = int(self.ranges[source].low[k])
                xs.append(held[:count, :, first - offset : last - offset])
            else:
                xs.append(call[source][samples, :, first:last])
            starts.append(first)
        held = self._held(call, index)
        if isinstance(one, Moments):
            out = call[index]
        elif held is not None:
            out = held[:count, :, new - low : high - low]
        else:
            out = call[index][samples, :, new:high]
        return Band(xs, starts, call, out, new, high, samples)

    def steps_of(self, call: Call, index: int, rows: _Rows) -> list[ProgramStep]:
        """Return the steps in C++; none if torch must run them."""
        if not isinstance(rows, Band):
            return [steps.copy_step(*rows)]
        one = self.schedule.operators[index]
        algorithm = one.algorithm(self.segment.cut) if isinstance(one, Convolution) else None
        if algorithm is None:
            return steps.steps_of(one, rows)
        assert isinstance(one, Convolution)
        return steps.convolution_steps(one, algorithm, rows, *self._addresses(call, index))

    def compute(self, call: Call, rows_of: Callable[..., _Rows | None], index: int, k: int) -> None:
        """Compute by torch, or by an algorithm that only Python can call."""
        rows, one = rows_of(call, index, k), self.schedule.operators[index]
        if not isinstance(rows, Band):
            assert rows is not None
            rows[0].copy_(rows[1])
            return
        algorithm = one.algorithm(self.segment.cut) if isinstance(one, Convolution) else None
        if algorithm is None:
            one.compute(rows)
        else:
            assert isinstance(one, Convolution)
            one.compute_ours(algorithm, rows, *self._addresses(call, index))
