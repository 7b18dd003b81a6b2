"""What the parts of a graph cost: seconds, each measured once and then stored, and bytes.

Operators are timed by themselves, on some rows of each; convolutions also in calls of the graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from math import inf
from typing import Any

import torch
from torch import Tensor

from mucudnn.core import VERSION
from mucudnn.core.config import Config
from mucudnn.core.errors import raise_interruption, say_once
from mucudnn.core.problem import ConvProblem, MemoryFormat
from mucudnn.core.records import Comparison, is_busy
from mucudnn.core.terminal import Progress
from mucudnn.graph.operators import Band, Barrier, Captured, Input, Moments, Operator, Ref, perform
from mucudnn.graph.schedule import Schedule
from mucudnn.graph.steps import array_of, run_array
from mucudnn.graph.windows import Convolution, convolutions_of
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.memory import aligned_buffer, format_of, peak_allocated_bytes
from mucudnn.measuring.clocks import wall_clock
from mucudnn.measuring.heap import is_heap_kept
from mucudnn.measuring.quiet import BUSY_TEXT, Quiet
from mucudnn.measuring.turns import Rounds, compare_in_turns, in_turns
from mucudnn.measuring.whole_runs import Machine
from mucudnn.solver.bands import Costs
from mucudnn.store.database import Database
from mucudnn.store.tuning_store import EnvironmentStore

_ROWS = 4, 32  # two heights of bands, between which costs are linear
_CALLS = 3
_LAUNCHES = 8  # one after another, on a GPU
CALL_S, _FLOP_S, BYTE_S = 1e-5, 1e-11, 1e-10  # of a made-up processor

Seconds = Sequence[Sequence[float]]  # samples of each call that was timed, in turns with the others


class Timings:
    """The timings of a graph: stored ones, and those that are measured now, and stored at once.

    All that are measured take ``config.time_limit`` together, or as long as they need. Disturbed ones are measured
    again on a quiet machine. of_bands: costs of bands, by problem, algorithm and number of operands.
    """

    def __init__(self, machine: Machine, database: Database, config: Config, progress: Progress) -> None:
        self.machine = machine
        self.left_s = inf if config.time_limit_s is None else config.time_limit_s
        self.of_bands: dict[tuple[ConvProblem, str, int], Costs | None] = {}
        self._store = EnvironmentStore(database, machine.environment)
        self._quiet = Quiet(machine.watch, progress, at=1.0)

    def of(self, what: str, measure: Callable[[], Seconds | None], *, in_any_case: bool = False) -> Seconds | None:
        """Return the samples of all calls that ``measure`` times; None where it returns None, which is not stored.

        what: says everything that the times depend on, apart from the machine and its software. in_any_case: whether to
        measure after the time limit, too; otherwise None is returned then for what is not known.
        """
        heap = "heap kept, " if is_heap_kept() else ""
        subject, clock, watch = f"{VERSION}, {heap}{what}", self.machine.clock, self.machine.watch
        known = self._store.timing(subject)
        if known is not None and not (is_busy(known[1]) and self._quiet.observe()):
            return known[0]
        if self.left_s <= 0 and not in_any_case:
            return None if known is None else known[0]
        self._quiet.wait()
        for _ in range(2):
            start_s, mark = clock.now(), watch.mark()
            seconds = measure()
            load = watch.since(mark).share
            self.left_s -= clock.now() - start_s
            if seconds is None or not is_busy(load) or self.left_s <= 0 or not self._quiet.wait().is_quiet:
                break
        if seconds is not None:
            self._store.add_timing(subject, seconds, load)
            if is_busy(load):
                say_once(BUSY_TEXT)
        return seconds

    def in_calls(
        self,
        what: str,
        schedules: Callable[[], Sequence[Schedule]],
        arguments: tuple[Any, ...],
        wanted: Sequence[tuple[int, int]],
        rounds: Rounds,
    ) -> Seconds | None:
        """Return the seconds of operators in calls of schedules, which get turns; None where there is no time for that.

        schedules: makes them. wanted: the operator's index, and the schedule's number, of each call whose samples are
        returned.
        """

        def measure() -> Seconds:
            calls = [partial(schedule.operator_times, arguments) for schedule in schedules()]
            within = replace(rounds, time_limit_s=min(rounds.time_limit_s, self.left_s))
            start_s, found = self.machine.clock.now(), list[list[dict[int, float]]]()
            for times in in_turns(calls):
                found.append(times)
                if within.is_enough(len(found), self.machine.clock.now() - start_s):
                    break
            return [[times[number][index] for times in found] for index, number in wanted]

        return self.of(what, measure)

    def compared(
        self, what: str, baseline: Callable[[], object], runs: Sequence[Callable[[], object]], rounds: Rounds
    ) -> dict[int, Comparison]:
        """Return comparisons of runs with a baseline, by number, without those that fail; also after the time limit.

        Raises any error of the baseline, and that of a run if all fail.
        """
        results: list[Comparison | Exception] = []

        def measure() -> Seconds | None:
            within = replace(rounds, time_limit_s=max(0.0, min(rounds.time_limit_s, self.left_s)))
            results[:] = compare_in_turns(baseline, runs, self.machine.clock, within, self.machine.watch)
            done = [one for one in results if isinstance(one, Comparison)]
            of_baseline = max((one.baseline_samples_s for one in done), key=len, default=())
            return [of_baseline, *(one.time_samples_s for one in done)] if len(done) == len(results) else None

        seconds = self.of(what, measure, in_any_case=True)
        if seconds is not None:
            of_baseline, *of_runs = seconds
            results[:] = [Comparison.of(of_baseline[: len(of_run)], of_run) for of_run in of_runs]
        found = {number: one for number, one in enumerate(results) if isinstance(one, Comparison)}
        if not found:
            raise next(one for one in results if isinstance(one, Exception))
        return found


def operator_key(captured: Captured, index: int) -> str:
    """Return what operators of equal costs have in common, as text."""
    one = captured.operators[index]
    read = [_result_key(captured.operators[source]) for source in (*one.sources, *one.wholes)]
    own: tuple[object, ...] = ()
    if isinstance(one, Convolution):
        own = one.problem, one.bias is not None, one.activation, one.output_padding
    elif isinstance(one, Barrier):
        own = (one.target, *one.with_each(_in_words))
    settings = [str(getattr(one, name)) for name in one.settings]
    return f"{type(one).__name__} {settings} {_result_key(one)} of {read} {own}"


def _result_key(one: Operator) -> str:
    return f"{one.dtype} {one.shape}" if isinstance(one, Barrier) else f"{one.dtype} {one.shape[1:]}"


def _in_words(value: object) -> object:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return "a result" if isinstance(value, Ref) else str(value)


def schedule_key(schedule: Schedule) -> str:
    """Return a text that differs for schedules of graphs, plans or algorithms that take other times."""
    keeps = {index: one.keeps for index, one in convolutions_of(schedule.operators).items()}
    algorithms = [f"{index} {keeps[index]} {named(one)}" for index, one in schedule.algorithms.items()]
    cuts = [(one.start, one.stop, replace(one.cut, variant=0)) for one in schedule.plan.segments]
    return f"{graph_key(schedule.captured)} {cuts} {algorithms} {schedule.arena_bytes}"


def graph_key(captured: Captured) -> str:
    """Return a text that differs for graphs whose calls take other times."""
    operators = [f"{operator_key(captured, i)} {one.sources} {one.wholes}" for i, one in enumerate(captured.operators)]
    results = [one.index for one in captured.results if isinstance(one, Ref)]
    return f"{captured.samples} {operators} {results} {captured.direct_results}"


def named(algorithm: Algorithm | None) -> str:
    return "torch's" if algorithm is None else f"{algorithm.name} {algorithm.version}"


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def operator_costs(captured: Captured, index: int, timings: Timings | None, known: dict[str, Costs]) -> Costs:
    """Return the costs of an operator by itself: seconds, and bytes that torch allocates beside the result.

    Operands are random, since there need not be memory for the model's own. A barrier that refuses them costs nothing.
    The seconds are measured; where there is no time for that, they are those of a made-up processor. known: what was
    returned before, of operators of equal costs, to which this is added.
    """
    key = operator_key(captured, index)
    if key not in known:
        known[key] = _operator_costs(captured, index, key, timings)
    return known[key]


@torch.no_grad()
def _operator_costs(captured: Captured, index: int, key: str, timings: Timings | None) -> Costs:
    operators = captured.operators
    one = operators[index]
    if isinstance(one, Input):
        return Costs()
    if isinstance(one, Barrier):
        try:
            calls = [partial(one.call, {whole: _some(operators[whole]) for whole in one.wholes})]
            scratch_bytes = max(_allocated_bytes(calls[0], one.device) - one.nbytes, 0)
            seconds = _least_seconds(key, lambda: calls, one.device, timings)
        except Exception as error:  # torch may raise anything for random operands
            raise_interruption(error)
            return Costs()
        call_s = CALL_S + BYTE_S * one.nbytes if seconds is None else seconds[0]
        return Costs(call_s=call_s, scratch_bytes=scratch_bytes)
    heights = _heights(one)
    calls = [partial(perform, one, _band(operators, index, height)) for height in heights]
    sizes = [_allocated_bytes(call, one.device) for call in calls]
    seconds = _least_seconds(key, lambda: calls, one.device, timings)
    row_bytes = 0 if len(heights) == 1 else max(-(-(sizes[1] - sizes[0]) // (heights[1] - heights[0])), 0)
    fixed_bytes = sizes[0] if len(heights) == 1 else max(sizes[0] - row_bytes * heights[0], 0)
    costs = estimated_costs(one) if seconds is None else _line(heights, seconds)
    return replace(costs, scratch_bytes=fixed_bytes, scratch_row_bytes=row_bytes)


@torch.no_grad()
def convolution_costs(captured: Captured, index: int, algorithm: Algorithm, timings: Timings) -> Costs | None:
    """Measure bands of a convolution by an algorithm of ours, whose filter is prepared; buffers are not counted.

    Returns None where there is no time for that.
    """
    one = captured.operators[index]
    assert isinstance(one, Convolution)
    kind = one.problem, algorithm.name, len(one.sources)
    if kind in timings.of_bands:
        return timings.of_bands[kind]
    prepared = aligned_buffer(algorithm.workspace(one.problem, 1).prepared_bytes)

    def call(height: int) -> Callable[[], object]:
        band = _band(captured.operators, index, height)
        above = one.above(band.low, band.starts[0])
        _, band.reserved = one.stage(algorithm, 1, band.xs[0].shape[2], height, above)
        scratch = aligned_buffer(band.reserved.scratch_bytes)
        band.algorithm, band.prepared, band.scratch = algorithm, prepared.data_ptr(), scratch.data_ptr()
        array = array_of(one.steps(band))

        def run(scratch: Tensor = scratch) -> None:  # to which the band refers
            if len(array):
                run_array(array, (ctypes.c_void_p * 1)())
            else:
                one.compute(band)

        return run

    def calls() -> list[Callable[[], object]]:
        algorithm.open(one.problem, one.weight, prepared)
        return [call(height) for height in _heights(one)]

    seconds = _least_seconds(f"{operator_key(captured, index)} by {named(algorithm)}", calls, one.device, timings)
    timings.of_bands[kind] = None if seconds is None else _line(_heights(one), seconds)
    return timings.of_bands[kind]


def _heights(one: Operator) -> list[int]:
    return sorted({min(rows, one.rows) for rows in _ROWS})


def _line(heights: Sequence[int], seconds: Sequence[float]) -> Costs:
    """Return the costs of bands, from the seconds of one or two heights."""
    if len(heights) == 1:
        return Costs(row_s=seconds[0] / heights[0])
    row_s = max(seconds[1] - seconds[0], 0.0) / (heights[1] - heights[0])
    return Costs(call_s=max(seconds[0] - row_s * heights[0], 0.0), row_s=row_s)


def estimated_costs(one: Operator) -> Costs:
    """Return the seconds of an operator on a made-up processor."""
    row_s = BYTE_S * Operator.row_bytes(one)
    if isinstance(one, Convolution):
        row_s += _FLOP_S * one.problem.flops(1) / one.rows
    return Costs(call_s=CALL_S, row_s=row_s)


def _allocated_bytes(call: Callable[[], object], device: torch.device) -> int:
    if device.type == "cuda":
        call()  # libraries search and load code
    return peak_allocated_bytes(call, device.type)


def _least_seconds(
    what: str, calls: Callable[[], Sequence[Callable[[], object]]], device: torch.device, timings: Timings | None
) -> list[float] | None:
    """Return the seconds of each call, on a GPU including its launch where that takes longer; None if not known."""
    if timings is None:
        return None
    is_cuda = device.type == "cuda"
    clock, times = (wall_clock(device.type), _LAUNCHES) if is_cuda else (timings.machine.clock, 1)

    def measure() -> list[list[float]]:
        return [[clock.time(call, times) / times for _ in range(_CALLS)] for call in calls()]

    samples = timings.of(f"operator by itself: {what}", measure)
    return None if samples is None else [min(of_call) for of_call in samples]


def _band(operators: Sequence[Operator], index: int, height: int) -> Band:
    """Return random operands of ``height`` rows of one sample from the middle of the image."""
    one = operators[index]
    low = (one.rows - height) // 2 // one.align * one.align
    xs, starts = [], []
    for reach in one.reaches():
        first, last = int(reach.first[low]), int(reach.last[low + height - 1])
        read = operators[reach.source]
        xs.append(_random((1, read.shape[1], last - first, *read.shape[3:]), read))
        starts.append(first)
    wholes = {whole: _some(operators[whole]) for whole in one.wholes}
    shape = 1, one.shape[1], height, *one.shape[3:]
    out = one.new_result() if isinstance(one, Moments) else _random(shape, one)
    return Band(xs, starts, wholes, out, low, low + height, slice(0, 1))


def _some(operator: Operator) -> Any:
    return operator.new_result() + 1 if isinstance(operator, Moments) else _random(operator.shape, operator)


def _random(shape: tuple[int, ...], like: Operator) -> Tensor:
    """Return a tensor of a shape, of the dtype and on the device of an operator's result."""
    is_float = like.dtype.is_floating_point
    made = (torch.rand if is_float else torch.zeros)(shape, device=like.device).to(like.dtype)
    if len(shape) not in (4, 5):
        return made
    return made.contiguous(memory_format=format_of(MemoryFormat.CHANNELS_LAST, len(shape)))


def every_cost(
    captured: Captured, timings: Timings | None, known: Mapping[int, tuple[Costs, ...]]
) -> dict[int, tuple[Costs, ...]]:
    """Return the costs of all operators by index. known: of those that need not be measured."""
    measured: dict[str, Costs] = {}
    others = (index for index in range(len(captured.operators)) if index not in known)
    return {**known, **{index: (operator_costs(captured, index, timings, measured),) for index in others}}
