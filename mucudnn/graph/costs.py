"""What the parts of a graph cost: seconds, each measured once and then stored, and bytes.

Operators are timed by themselves, on some rows of each; convolutions also in calls of the graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from mucudnn.core.errors import raise_interruption
from mucudnn.core.problem import MemoryFormat
from mucudnn.graph.operators.convolution import Convolution
from mucudnn.graph.operators.operator import Band, Barrier, Captured, Input, Moments, Operator, Ref, perform
from mucudnn.graph.operators.steps import array_of, run_array
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.memory import aligned_buffer, format_of, peak_allocated_bytes
from mucudnn.measuring.clocks import wall_clock
from mucudnn.measuring.timings import Timings
from mucudnn.solver.bands import Costs

_ROWS = 4, 32  # two heights of bands, between which costs are linear
_CALLS = 3
_LAUNCHES = 8  # one after another, on a GPU
CALL_S, _FLOP_S, BYTE_S = 1e-5, 1e-11, 1e-10  # of a made-up processor


def operator_key(captured: Captured, index: int) -> str:
    """Return what operators of equal costs have in common, as text."""
    operator = captured.operators[index]
    read = [_result_key(captured.operators[source]) for source in (*operator.sources, *operator.wholes)]
    details: tuple[object, ...] = ()
    if isinstance(operator, Convolution):
        details = operator.problem, operator.bias is not None, operator.activation, operator.output_padding
    elif isinstance(operator, Barrier):
        details = (operator.target, *operator.with_each(_in_words))
    settings = [str(getattr(operator, name)) for name in operator.settings]
    return f"{type(operator).__name__} {settings} {_result_key(operator)} of {read} {details}"


def _result_key(operator: Operator) -> str:
    shape = operator.shape if isinstance(operator, Barrier) else operator.shape[1:]
    return f"{operator.dtype} {shape}"


def _in_words(value: object) -> object:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return "a result" if isinstance(value, Ref) else str(value)


def schedule_key(schedule: Schedule) -> str:
    """Return a text that differs for schedules of graphs, plans or algorithms that take other times."""
    kept = schedule.costed.kept
    algorithms = [f"{index} {index in kept} {named(algorithm)}" for index, algorithm in schedule.algorithms.items()]
    cuts = [(segment.start, segment.stop, replace(segment.cut, variant=0)) for segment in schedule.plan.segments]
    return f"{graph_key(schedule.captured)} {cuts} {algorithms} {schedule.arena_bytes}"


def graph_key(captured: Captured) -> str:
    """Return a text that differs for graphs whose calls take other times."""
    operators = [
        f"{operator_key(captured, index)} {operator.sources} {operator.wholes}"
        for index, operator in enumerate(captured.operators)
    ]
    results = [result.index for result in captured.results if isinstance(result, Ref)]
    return f"{captured.samples} {operators} {results} {captured.direct_results}"


def named(algorithm: Algorithm | None) -> str:
    return "torch's" if algorithm is None else f"{algorithm.name} {algorithm.version}"


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def operator_costs(captured: Captured, index: int, timings: Timings | None, known: dict[str, Costs]) -> Costs:
    """Return the costs of an operator by itself: seconds, and bytes that torch allocates beside the result.

    Operands are random, since there need not be memory for the model's own. A barrier that refuses them costs nothing.
    The seconds are measured; where there is no time for that, they are those of a made-up processor.

    known: what was returned before, of operators of equal costs, to which this is added.
    """
    key = operator_key(captured, index)
    if key not in known:
        known[key] = _operator_costs(captured, index, key, timings)
    return known[key]


@torch.no_grad()
def _operator_costs(captured: Captured, index: int, key: str, timings: Timings | None) -> Costs:
    operators = captured.operators
    operator = operators[index]
    if isinstance(operator, Input):
        return Costs()
    if isinstance(operator, Barrier):
        try:
            calls = [partial(operator.call, {whole: _random_result(operators[whole]) for whole in operator.wholes})]
            scratch_bytes = max(_allocated_bytes(calls[0], operator.device) - operator.nbytes, 0)
            seconds = _least_seconds(key, lambda: calls, operator.device, timings)
        except Exception as error:  # torch may raise anything for random operands
            raise_interruption(error)
            return Costs()
        call_s = CALL_S + BYTE_S * operator.nbytes if seconds is None else seconds[0]
        return Costs(call_s=call_s, scratch_bytes=scratch_bytes)

    # Bands of two heights, between which bytes and seconds are linear
    heights = _heights(operator)
    calls = [partial(perform, operator, _band(operators, index, height)) for height in heights]
    sizes = [_allocated_bytes(call, operator.device) for call in calls]
    seconds = _least_seconds(key, lambda: calls, operator.device, timings)
    row_bytes = 0 if len(heights) == 1 else max(-(-(sizes[1] - sizes[0]) // (heights[1] - heights[0])), 0)
    fixed_bytes = sizes[0] if len(heights) == 1 else max(sizes[0] - row_bytes * heights[0], 0)
    costs = estimated_costs(operator) if seconds is None else _line(heights, seconds)
    return replace(costs, scratch_bytes=fixed_bytes, scratch_row_bytes=row_bytes)


@torch.no_grad()
def convolution_costs(captured: Captured, index: int, algorithm: Algorithm, timings: Timings) -> Costs | None:
    """Measure bands of a convolution by an algorithm of ours, whose filter is prepared; buffers are not counted.

    Returns None where there is no time for that.
    """
    convolution = captured.operators[index]
    assert isinstance(convolution, Convolution)
    kind = convolution.problem, algorithm.name, len(convolution.sources)
    if kind in timings.band_costs:
        return timings.band_costs[kind]
    prepared = aligned_buffer(convolution.prepared_bytes(algorithm))

    def call(height: int) -> Callable[[], object]:
        band = _band(captured.operators, index, height)
        above = convolution.above(band.low, band.starts[0])
        stage, band.reserved = convolution.stage(algorithm, 1, band.xs[0].shape[2], height, above)
        scratch = aligned_buffer(band.reserved.scratch_bytes)
        band.algorithm, band.prepared, band.scratch = algorithm, prepared.data_ptr(), scratch.data_ptr()
        array = array_of(convolution.steps(band))

        def run(memory: object = (stage, scratch)) -> None:  # to which steps refer
            if len(array):
                run_array(array, (ctypes.c_void_p * 1)())
            else:
                convolution.compute(band)

        return run

    def calls() -> list[Callable[[], object]]:
        algorithm.open(convolution.problem, convolution.weight, prepared)
        return [call(height) for height in _heights(convolution)]

    what = f"{operator_key(captured, index)} by {named(algorithm)}"
    seconds = _least_seconds(what, calls, convolution.device, timings)
    timings.band_costs[kind] = None if seconds is None else _line(_heights(convolution), seconds)
    return timings.band_costs[kind]


def _heights(operator: Operator) -> list[int]:
    return sorted({min(rows, operator.rows) for rows in _ROWS})


def _line(heights: Sequence[int], seconds: Sequence[float]) -> Costs:
    """Return the costs of bands, from the seconds of one or two heights."""
    if len(heights) == 1:
        return Costs(row_s=seconds[0] / heights[0])
    row_s = max(seconds[1] - seconds[0], 0.0) / (heights[1] - heights[0])
    return Costs(call_s=max(seconds[0] - row_s * heights[0], 0.0), row_s=row_s)


def estimated_costs(operator: Operator) -> Costs:
    """Return the seconds of an operator on a made-up processor."""
    row_s = BYTE_S * Operator.row_bytes(operator)
    if isinstance(operator, Convolution):
        row_s += _FLOP_S * operator.problem.flops(1) / operator.rows
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
    operator = operators[index]
    low = (operator.rows - height) // 2 // operator.align * operator.align
    xs, starts = [], []
    for reach in operator.reaches():
        first, last = int(reach.first[low]), int(reach.last[low + height - 1])
        source = operators[reach.source]
        xs.append(_random((1, source.shape[1], last - first, *source.shape[3:]), source))
        starts.append(first)
    wholes = {whole: _random_result(operators[whole]) for whole in operator.wholes}
    shape = 1, operator.shape[1], height, *operator.shape[3:]
    out = operator.new_result() if isinstance(operator, Moments) else _random(shape, operator)
    return Band(xs, starts, wholes, out, low, low + height, slice(0, 1))


def _random_result(operator: Operator) -> Any:
    return operator.new_result() + 1 if isinstance(operator, Moments) else _random(operator.shape, operator)


def _random(shape: tuple[int, ...], like: Operator) -> Tensor:
    """Return a tensor of a shape, of the dtype and on the device of an operator's result."""
    fill = torch.rand if like.dtype.is_floating_point else torch.zeros
    tensor = fill(shape, device=like.device).to(like.dtype)
    if len(shape) not in (4, 5):
        return tensor
    return tensor.contiguous(memory_format=format_of(MemoryFormat.CHANNELS_LAST, len(shape)))


def every_cost(
    captured: Captured, timings: Timings | None, known: Mapping[int, tuple[Costs, ...]]
) -> dict[int, tuple[Costs, ...]]:
    """Return the costs of all operators by index. known: of those that need not be measured."""
    measured: dict[str, Costs] = {}
    others = (index for index in range(len(captured.operators)) if index not in known)
    return {**known, **{index: (operator_costs(captured, index, timings, measured),) for index in others}}
