"""Programs: a schedule's steps, recorded in its first call and run in later ones, mostly by one call of C++."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from mucudnn.core.problem import MemoryFormat
from mucudnn.graph.guards import extent
from mucudnn.graph.operators import steps
from mucudnn.graph.operators.convolution import Convolution
from mucudnn.graph.operators.moves import Copy
from mucudnn.graph.operators.operator import Band, Barrier, Input, Moments, Operator
from mucudnn.kernels.compiled.library import ProgramStep
from mucudnn.kernels.memory import dense_strides

if TYPE_CHECKING:
    from mucudnn.graph.schedule import Schedule

_NULL, _ARENA, _FIRST_VALUE = range(3)  # entries of the table of addresses; then one for each operator
_MOST_STEPS = 1024  # of an item: until then, each takes 4 KB
_COPY = Copy(name="rows", shape=(), dtype=torch.float32)
_Item: TypeAlias = Callable[["Frame"], object]
_Turn: TypeAlias = tuple[int, int, int, slice]  # numbers of a segment, of an operator and of a band; its samples


class Frame(dict[int, Any]):
    """The memory of one call of a schedule: the results that are alive by index, and the table of their addresses."""

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
        operator = self.schedule.operators[index]
        return self.rows(operator, self.schedule.whole[index], self.schedule.captured.samples, operator.rows)

    def rows(self, operator: Operator, offset: int, samples: int, rows: int) -> Tensor:
        """Return the view of some rows of an operator's result, which are in channels_last, in the arena."""
        shape = samples, operator.shape[1], rows, *operator.shape[3:]
        flat = self.arena[offset : offset + prod(shape) * operator.dtype.itemsize].view(operator.dtype)
        return flat.as_strided(shape, dense_strides(shape, MemoryFormat.CHANNELS_LAST), flat.storage_offset())


@dataclass
class Program:
    """The items of a schedule's calls, for arguments of the same strides.

    items: in order, each with the index of the operator to which it belongs, of the last if it runs steps of several.
    kept: tables and stages to whose memory steps refer.
    makes_results: whether all results are new and as the caller gets them.
    """

    items: list[tuple[int, _Item]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    makes_results: bool = False

    def run(self, frame: Frame) -> None:
        for _, item in self.items:
            item(frame)

    def timed(self, frame: Frame) -> dict[int, float]:
        """Run, and return the seconds that each item took, added by operator."""
        seconds: dict[int, float] = {}
        for owner, item in self.items:
            start_s = time.perf_counter()
            item(frame)
            seconds[owner] = seconds.get(owner, 0.0) + time.perf_counter() - start_s
        return seconds


def record(frame: Frame, *, joins: bool = True) -> Program:
    """Run a call, and return the program that repeats it. joins: whether operators are run together where possible."""
    schedule, recorder = frame.schedule, _Recorder(frame, joins=joins)
    runs_cpp = schedule.captured.device.type == "cpu" and steps.is_available()
    for index in schedule.captured.direct_results:
        recorder.do(index, partial(_make, index=index))
    for number, segment in enumerate(schedule.plan.segments):
        cut, operators = segment.cut, range(segment.start, segment.stop)
        for index in operators:
            if isinstance(schedule.operators[index], (Input, Barrier, Moments)):
                recorder.do(index, partial(_make, index=index))
            elif schedule.algorithms.get(index) is not None and index not in schedule.costed.kept:
                recorder.do(index, partial(_prepare_filter, number=number, index=index))
        turns: list[_Turn] = []
        if schedule.operators[segment.start].rows:
            for start in range(0, schedule.captured.samples, cut.samples):
                samples = slice(start, min(start + cut.samples, schedule.captured.samples))
                turns += [(number, index, k, samples) for k in range(cut.bands) for index in operators]
        for turn in turns:
            index = turn[1]
            for operator, band_of in ((_COPY, _taken), (schedule.operators[index], _band), (_COPY, _left)):
                band = band_of(frame, *turn)
                if band is None:
                    continue
                compiled = operator.steps(band) if runs_cpp else []
                if compiled:
                    recorder.run_steps(index, compiled)
                else:
                    recorder.do(index, partial(_compute, operator=operator, band_of=band_of, turn=turn))
        ended = [index for index in frame if schedule.graph.last_use[index] < segment.stop]
        if ended:
            recorder.do(segment.stop - 1, partial(_free, indices=ended))
    recorder.flush()
    return recorder.program


class _Recorder:
    """Runs items and steps, and adds them to a program. Steps that follow each other become one item."""

    def __init__(self, frame: Frame, *, joins: bool) -> None:
        self.frame, self.joins, self.program = frame, joins, Program()
        self.owner, self.steps = 0, list[ProgramStep]()  # not yet in the program

    def do(self, owner: int, item: _Item) -> None:
        self.flush()
        item(self.frame)
        self.program.items.append((owner, item))

    def run_steps(self, owner: int, compiled: list[ProgramStep]) -> None:
        if owner != self.owner and not self.joins:
            self.flush()
        for step in compiled:
            for place in steps.places(step):
                place.base, place.offset = _relative(self.frame, place.offset)
            self.program.kept += step.kept
        steps.run_array(steps.array_of(compiled), self.frame.bases)
        self.owner = owner
        self.steps += compiled
        if len(self.steps) >= _MOST_STEPS:
            self.flush()

    def flush(self) -> None:
        """Add the steps so far to the program, as one item."""
        if self.steps:
            self.program.items.append((self.owner, partial(_run_array, array=steps.array_of(self.steps))))
            self.steps = []


def _relative(frame: Frame, address: int) -> tuple[int, int]:
    """Return the entry of the table of addresses, and the bytes behind it, of an address."""
    arena = frame.arena
    if 0 <= address - arena.data_ptr() < arena.nbytes:
        return _ARENA, address - arena.data_ptr()
    for index, value in frame.items():
        if isinstance(value, Tensor):
            size = extent(value.shape, value.stride()) * value.itemsize
            if 0 <= address - value.data_ptr() < size:
                return index + _FIRST_VALUE, address - value.data_ptr()
    return _NULL, address


# Items


def _run_array(frame: Frame, array: Any) -> None:
    steps.run_array(array, frame.bases)


def _make(frame: Frame, index: int) -> None:
    """Make a result that no band makes: an argument, a barrier's, zero sums, or what bands write for the caller."""
    operator = frame.schedule.operators[index]
    if isinstance(operator, Input):
        frame[index] = frame.leaves[operator.number]
    elif isinstance(operator, Barrier):
        frame[index] = operator.call(frame)
    elif isinstance(operator, Moments):
        frame[index] = operator.new_result()
    else:
        strides = frame.schedule.captured.direct_results[index]
        shape = operator.shape[: len(strides)]
        frame[index] = torch.empty_strided(shape, strides, dtype=operator.dtype, device=operator.device)


def _prepare_filter(frame: Frame, number: int, index: int) -> None:
    """Prepare the filter of a convolution in the block of its segment."""
    schedule, buffers = frame.schedule, frame.schedule.buffers[number][index]
    convolution, algorithm = schedule.operators[index], schedule.algorithms[index]
    assert isinstance(convolution, Convolution)
    assert algorithm is not None
    start = schedule.starts[number] + buffers.prepared
    prepared = frame.arena[start : start + buffers.reserved.prepared_bytes]
    algorithm.open(convolution.problem, convolution.weight, prepared)


def _free(frame: Frame, indices: Sequence[int]) -> None:
    for index in indices:
        del frame[index]


def _compute(frame: Frame, operator: Operator, band_of: Callable[..., Band | None], turn: _Turn) -> None:
    """Compute by torch, or by an algorithm that only Python can call."""
    band = band_of(frame, *turn)
    assert band is not None
    operator.compute(band)


# Bands: of the operator ``index`` in band k of segment ``number``


def _held(frame: Frame, number: int, index: int) -> Tensor | None:
    """Return the rows of a result that a band holds, which may be none; None for a result that is needed as a whole."""
    schedule, buffers = frame.schedule, frame.schedule.buffers[number].get(index)
    segment = schedule.plan.segments[number]
    if buffers is None or (buffers.held_rows == 0 and schedule.graph.is_whole(index, segment.stop)):
        return None
    offset = schedule.starts[number] + buffers.held
    return frame.rows(schedule.operators[index], offset, segment.cut.samples, buffers.held_rows)


def _kept(frame: Frame, number: int, index: int) -> Tensor:
    """Return the rows that the next band needs again."""
    schedule, buffers = frame.schedule, frame.schedule.buffers[number][index]
    samples = schedule.plan.segments[number].cut.samples
    return frame.rows(schedule.operators[index], schedule.starts[number] + buffers.kept, samples, buffers.kept_rows)


def _taken(frame: Frame, number: int, index: int, k: int, samples: slice) -> Band | None:
    """Return a copy of rows that an earlier band computed; None if there are none."""
    rows = frame.schedule.ranges[number][index]
    count = int(rows.new[k]) - int(rows.low[k])
    held = _held(frame, number, index) if count > 0 else None
    if held is None:
        return None
    kept = _kept(frame, number, index)[:, :, :count]
    return Band((kept,), (0,), {}, held[:, :, :count], 0, count, samples)


def _left(frame: Frame, number: int, index: int, k: int, samples: slice) -> Band | None:
    """Return a copy of rows that the next band needs; None if there are none."""
    if frame.schedule.buffers[number][index].kept_rows == 0 or k + 1 == frame.schedule.plan.segments[number].cut.bands:
        return None
    rows = frame.schedule.ranges[number][index]
    low, first, until = int(rows.low[k]), int(rows.low[k + 1]), int(rows.new[k + 1])
    held = _held(frame, number, index)
    if until <= first or held is None:
        return None
    kept = _kept(frame, number, index)[:, :, : until - first]
    return Band((held[:, :, first - low : until - low],), (0,), {}, kept, 0, until - first, samples)


def _band(frame: Frame, number: int, index: int, k: int, samples: slice) -> Band | None:
    """Return the operands of an operator; None if it computes no rows."""
    schedule = frame.schedule
    operator, rows, cut = schedule.operators[index], schedule.ranges[number][index], schedule.plan.segments[number].cut
    low, new, high = int(rows.low[k]), int(rows.new[k]), int(rows.high[k])
    if high <= new:
        return None

    # What is read: rows that the segment holds, or some of a whole result
    count, xs, starts = samples.stop - samples.start, [], []
    for position, source in enumerate(operator.sources):
        first, last = schedule.read(index, position, new, high, cut)
        held = _held(frame, number, source)
        if held is not None:
            offset = int(schedule.ranges[number][source].low[k])
            xs.append(held[:count, :, first - offset : last - offset])
        else:
            xs.append(frame[source][samples, :, first:last])
        starts.append(first)

    # What is written, and the buffers of our algorithm
    held = _held(frame, number, index)
    if isinstance(operator, Moments):
        out = frame[index]
    elif held is not None:
        out = held[:count, :, new - low : high - low]
    elif frame[index].dim() == 2:  # as the caller gets its pixels
        out = frame[index][samples, :, None, None]
    else:
        out = frame[index][samples, :, new:high]
    band = Band(xs, starts, frame, out, new, high, samples)
    if isinstance(operator, Convolution) and (algorithm := schedule.algorithms[index]):
        buffers, start = schedule.buffers[number][index], frame.arena.data_ptr() + schedule.starts[number]
        band.algorithm, band.scratch, band.reserved = algorithm, start + buffers.scratch, buffers.reserved
        band.prepared = start + buffers.prepared
        if index in schedule.costed.kept:
            kept = schedule.costed.filters.prepared(operator, algorithm)
            band.prepared, band.reserved = kept.data_ptr(), replace(buffers.reserved, prepared_bytes=kept.nbytes)
    return band
