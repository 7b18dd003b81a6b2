"""Costs of a graph's operators: convolutions from their measurements, all others by running some rows of each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mucudnn.graph.convolution import Convolution
from mucudnn.graph.operators import Band, Barrier, Captured, Input, Moments, Operator, perform
from mucudnn.graph.steps import array_of, run_array
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.memory import aligned_buffer, peak_allocated_bytes
from mucudnn.measuring.clocks import Clock, wall_clock
from mucudnn.solver.bands import Costs, Reach

_ROWS = 4, 32  # two heights of bands, between which costs are linear
_CALLS = 3
_LAUNCHES = 8  # one after another, on a GPU


@torch.no_grad()
def operator_costs(captured: Captured, index: int, clock: Clock | None) -> Costs:
    """Measure an operator by itself: seconds, with a clock, and bytes that torch allocates beside the result.

    Operands are random, since there need not be memory for the model's own. A barrier that refuses them costs nothing.
    """
    operators = captured.operators
    one = operators[index]
    if isinstance(one, Input):
        return Costs()
    if isinstance(one, Barrier):
        try:
            call = partial(one.call, {whole: _some(operators[whole]) for whole in one.wholes})
            time_s, allocated = _measured(call, clock, one.device)
        except Exception:  # torch may raise anything for random operands
            return Costs()
        return Costs(call_s=time_s, scratch_bytes=max(allocated - one.nbytes, 0))
    return _line(one, lambda height: partial(perform, one, _band(operators, index, height)), clock)


@torch.no_grad()
def convolution_costs(captured: Captured, index: int, algorithm: Algorithm, clock: Clock) -> Costs:
    """Measure bands of a convolution by an algorithm of ours, whose filter is prepared; buffers are not counted."""
    one = captured.operators[index]
    assert isinstance(one, Convolution)
    prepared = aligned_buffer(algorithm.workspace(one.problem, 1).prepared_bytes)
    algorithm.open(one.problem, one.weight, prepared)

    def call(height: int) -> Callable[[], None]:
        band = _band(captured.operators, index, height)
        above = one.above(band.low, band.starts[0])
        _, workspace = one.stage(algorithm, 1, band.xs[0].shape[2], height, above)
        scratch = aligned_buffer(workspace.scratch_bytes)
        band.algorithm, band.prepared, band.scratch = algorithm, prepared.data_ptr(), scratch.data_ptr()
        steps = one.steps(band)
        return partial(_run, array_of(steps), one, band, scratch)

    costs = _line(one, call, clock)
    return Costs(costs.call_s, costs.row_s)


def _run(array: Any, one: Convolution, band: Band, scratch: Tensor) -> None:
    """Run steps, or the convolution if it has none. scratch: to which the band refers."""
    if len(array):
        run_array(array, (ctypes.c_void_p * 1)())
    else:
        one.compute(band)


def _line(one: Operator, call: Callable[[int], Callable[[], object]], clock: Clock | None) -> Costs:
    """Return the costs of bands, from those of two heights. call: makes the call for a height."""
    heights = sorted({min(rows, one.rows) for rows in _ROWS})
    found = [_measured(call(height), clock, one.device) for height in heights]
    (first_s, first_bytes), (last_s, last_bytes) = found[0], found[-1]
    if len(heights) == 1:
        return Costs(row_s=first_s / heights[0], scratch_bytes=first_bytes)
    apart = heights[1] - heights[0]
    row_s, row_bytes = max(last_s - first_s, 0.0) / apart, max(-(-(last_bytes - first_bytes) // apart), 0)
    return Costs(
        call_s=max(first_s - row_s * heights[0], 0.0),
        row_s=row_s,
        scratch_bytes=max(first_bytes - row_bytes * heights[0], 0),
        scratch_row_bytes=row_bytes,
    )


def _measured(call: Callable[[], object], clock: Clock | None, device: torch.device) -> tuple[float, int]:
    """Return the seconds of a call, on a GPU including its launch where that takes longer, and the bytes allocated."""
    calls = 1
    if device.type == "cuda":
        call()  # libraries search and load code
        calls = _LAUNCHES
    allocated = peak_allocated_bytes(call, device.type)
    if clock is None:
        return 0.0, allocated
    if device.type == "cuda":
        clock = wall_clock(device.type)
    return min(clock.time(call, calls) / calls for _ in range(_CALLS)), allocated


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


def key_of(captured: Captured, index: int) -> object:
    """Return what operators of equal costs have in common."""
    one = captured.operators[index]
    read = tuple((captured.operators[source].shape[1:], captured.operators[source].dtype) for source in one.sources)
    return type(one), *(getattr(one, name) for name in one.settings), one.shape[1:], one.dtype, read


def every_cost(
    captured: Captured, clock: Clock, known: Mapping[int, tuple[Costs, ...]]
) -> dict[int, tuple[Costs, ...]]:
    """Return the costs of all operators by index. known: of those that need not be measured."""
    measured: dict[object, Costs] = {}
    costs = dict(known)
    for index in range(len(captured.operators)):
        if index in costs:
            continue
        key = key_of(captured, index)
        if key not in measured:
            measured[key] = operator_costs(captured, index, clock)
        costs[index] = (measured[key],)
    return costs
