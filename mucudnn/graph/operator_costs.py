"""Costs of a graph's operators: convolutions from their measurements, all others by running some rows of each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mucudnn.graph.convolution import Convolution
from mucudnn.graph.operators import Band, Barrier, Captured, Input, Moments, Operator, perform
from mucudnn.graph.steps import array_of, run_array
from mucudnn.graph.timings import Timings, key_of, named
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.memory import aligned_buffer, peak_allocated_bytes
from mucudnn.measuring.clocks import wall_clock
from mucudnn.solver.bands import Costs, Reach

_ROWS = 4, 32  # two heights of bands, between which costs are linear
_CALLS = 3
_LAUNCHES = 8  # one after another, on a GPU
CALL_S, _FLOP_S, BYTE_S = 1e-5, 1e-11, 1e-10  # of a made-up processor


@torch.no_grad()
def operator_costs(captured: Captured, index: int, timings: Timings | None) -> Costs:
    """Return the costs of an operator by itself: seconds, and bytes that torch allocates beside the result.

    Operands are random, since there need not be memory for the model's own. A barrier that refuses them costs nothing.
    The seconds are measured; where there is no time for that, they are those of a made-up processor.
    """
    operators = captured.operators
    one = operators[index]
    if isinstance(one, Input):
        return Costs()
    if isinstance(one, Barrier):
        try:
            calls = [partial(one.call, {whole: _some(operators[whole]) for whole in one.wholes})]
            scratch_bytes = max(_allocated_bytes(calls[0], one.device) - one.nbytes, 0)
            seconds = _seconds(key_of(captured, index), lambda: calls, one.device, timings)
        except Exception:  # torch may raise anything for random operands
            return Costs()
        call_s = CALL_S + BYTE_S * one.nbytes if seconds is None else seconds[0]
        return Costs(call_s=call_s, scratch_bytes=scratch_bytes)
    heights = _heights(one)
    calls = [partial(perform, one, _band(operators, index, height)) for height in heights]
    sizes = [_allocated_bytes(call, one.device) for call in calls]
    seconds = _seconds(key_of(captured, index), lambda: calls, one.device, timings)
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

    def call(height: int) -> Callable[[], object]:
        band = _band(captured.operators, index, height)
        above = one.above(band.low, band.starts[0])
        _, workspace = one.stage(algorithm, 1, band.xs[0].shape[2], height, above)
        scratch = aligned_buffer(workspace.scratch_bytes)
        band.algorithm, band.prepared, band.scratch = algorithm, prepared.data_ptr(), scratch.data_ptr()
        steps = one.steps(band)
        return partial(_run, array_of(steps), one, band, scratch)

    def calls() -> list[Callable[[], object]]:
        algorithm.open(one.problem, one.weight, prepared)
        return [call(height) for height in _heights(one)]

    prepared = aligned_buffer(algorithm.workspace(one.problem, 1).prepared_bytes)
    seconds = _seconds(f"{key_of(captured, index)} by {named(algorithm)}", calls, one.device, timings)
    return None if seconds is None else _line(_heights(one), seconds)


def _run(array: Any, one: Convolution, band: Band, scratch: Tensor) -> None:
    """Run steps, or the convolution if it has none. scratch: to which the band refers."""
    if len(array):
        run_array(array, (ctypes.c_void_p * 1)())
    else:
        one.compute(band)


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
    row_s = BYTE_S * one.shape[1] * one.shape[3] * one.dtype.itemsize if one.rows else 0.0
    if isinstance(one, Convolution):
        row_s += _FLOP_S * one.problem.flops(1) / one.rows
    return Costs(call_s=CALL_S, row_s=row_s)


def _allocated_bytes(call: Callable[[], object], device: torch.device) -> int:
    if device.type == "cuda":
        call()  # libraries search and load code
    return peak_allocated_bytes(call, device.type)


def _seconds(
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
        first, last = _read(reach, low, low + height)
        _, channels, _, width = operators[reach.source].shape
        shape = (1, channels, last - first, width)
        xs.append(_random(shape, operators[reach.source]))
        starts.append(first)
    wholes = {whole: _some(operators[whole]) for whole in one.wholes}
    shape = 1, one.shape[1], height, one.shape[3]
    out = one.new_result() if isinstance(one, Moments) else _random(shape, one)
    return Band(xs, starts, wholes, out, low, low + height, slice(0, 1))


def _read(reach: Reach, low: int, high: int) -> tuple[int, int]:
    return int(reach.first[low]), int(reach.last[high - 1])


def _some(operator: Operator) -> Any:
    return operator.new_result() + 1 if isinstance(operator, Moments) else _random(operator.shape, operator)


def _random(shape: tuple[int, ...], like: Operator) -> Tensor:
    """Return a tensor of a shape, of the dtype and on the device of an operator's result."""
    is_float = like.dtype.is_floating_point
    made = (torch.rand if is_float else torch.zeros)(shape, device=like.device).to(like.dtype)
    return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made


def every_cost(
    captured: Captured, timings: Timings | None, known: Mapping[int, tuple[Costs, ...]]
) -> dict[int, tuple[Costs, ...]]:
    """Return the costs of all operators by index. known: of those that need not be measured."""
    measured: dict[str, Costs] = {}
    costs = dict(known)
    for index in range(len(captured.operators)):
        if index in costs:
            continue
        key = key_of(captured, index)
        if key not in measured:
            measured[key] = operator_costs(captured, index, timings)
        costs[index] = (measured[key],)
    return costs
