"""Direct sums: every way in which windows are cut, against float64, and what is left to other algorithms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.half_precision import assert_half_is_float32_rounded_once

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.registry import algorithm
from mucudnn.testing.checks import threads
from mucudnn.testing.guarded_call import Call
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

DEPTHWISE = algorithm("depthwise")
pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
by_operation = pytest.mark.parametrize("operation", Operation)
by_format = pytest.mark.parametrize("memory_format", MemoryFormat)


def depthwise(operation: Operation, channels: int, size: int, taps: int, **changes: Any) -> ConvProblem:
    arguments = {"groups": channels, "padding": (taps // 2, taps // 2)} | changes
    return ConvProblem(operation, channels, size, size, channels, taps, taps, **arguments)


WINDOWS: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # channels, size of the map, of the filter, the rest
    "one row is a vector": (35, 7, 3, {}),
    "two vectors overlap": (35, 14, 3, {}),
    "rows by blocks of channels": (35, 13, 5, {}),
    "several bands": (18, 120, 3, {}),
    "several bands, every other row": (18, 121, 3, {"stride": (2, 2)}),
    "residues by blocks of channels": (35, 14, 3, {"stride": (2, 2)}),
    "odd residues": (35, 15, 5, {"stride": (2, 2)}),
    "strides of three and one": (19, 31, 3, {"stride": (3, 1)}),
    "stride and dilation": (19, 29, 3, {"stride": (2, 3), "dilation": (3, 2), "padding": (3, 2)}),
    "dilation": (19, 33, 3, {"dilation": (2, 2), "padding": (2, 2)}),
    "rows of 7": (18, 28, 7, {}),
    "rows of 7 + 5 + 1": (9, 24, 13, {}),
    "a filter of 31x31": (9, 33, 31, {}),
    "a map smaller than a vector": (37, 2, 3, {}),
    "a map of one pixel": (35, 1, 5, {}),
    "one output": (35, 5, 5, {"padding": (0, 0)}),
    "more padding than map": (19, 5, 3, {"padding": (4, 6)}),
    "several runs of channels": (150, 7, 5, {}),
    "an image that leaves the cache": (67, 48, 3, {}),
    "every other row of an image that leaves the cache": (67, 48, 5, {"stride": (2, 2)}),
}


@by_operation
@by_format
@pytest.mark.parametrize("case", WINDOWS)
def test_every_kind_of_window_is_the_convolution(case: str, memory_format: MemoryFormat, operation: Operation) -> None:
    channels, size, taps, changes = WINDOWS[case]
    problem = depthwise(operation, channels, size, taps, memory_format=memory_format, **changes)
    call = Call(problem, 3)
    expected = reference(problem, call.x, call.w, call.y)
    assert relative_l2_error(call.run(DEPTHWISE, [2, 1]), expected) < 2e-6  # long sums of dw


@by_operation
@by_format
@pytest.mark.parametrize(("c", "k", "groups"), [(20, 40, 20), (12, 36, 12), (40, 20, 20), (24, 40, 8), (16, 16, 2)])
def test_multipliers_and_small_groups(
    c: int, k: int, groups: int, memory_format: MemoryFormat, operation: Operation
) -> None:
    for size, taps, stride in ((9, 3, 1), (17, 3, 2), (12, 5, 1)):
        geometry = {"stride": (stride, stride), "padding": (taps // 2, taps // 2), "groups": groups}
        problem = ConvProblem(operation, c, size, size, k, taps, taps, **geometry, memory_format=memory_format)
        call = Call(problem, 2)
        expected = reference(problem, call.x, call.w, call.y)
        assert relative_l2_error(call.run(DEPTHWISE, [2]), expected) < 1e-6


@by_operation
@by_format
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", WINDOWS)
def test_half_precision_is_float32_rounded_once(
    case: str, dtype: str, memory_format: MemoryFormat, operation: Operation
) -> None:
    channels, size, taps, changes = WINDOWS[case]
    problem = depthwise(operation, channels, size, taps, memory_format=memory_format, dtype=dtype, **changes)
    assert_half_is_float32_rounded_once(DEPTHWISE, problem, [2, 1])


@by_operation
@by_format
@pytest.mark.parametrize("size", [7, 40])
def test_the_number_of_threads_does_not_change_a_bit(
    size: int, memory_format: MemoryFormat, operation: Operation
) -> None:
    problem = depthwise(operation, 35, size, 3, memory_format=memory_format)
    results = []
    for count in (1, 2, 5):
        torch.manual_seed(0)
        with threads(count):
            results.append(Call(problem, 5).run(DEPTHWISE, [5]).clone())
    assert all(torch.equal(results[0], other) for other in results[1:])


@by_operation
def test_what_is_left_to_other_algorithms_has_a_reason(operation: Operation) -> None:
    plain = ConvProblem(operation, 8, 9, 9, 8, 3, 3)
    assert "of 1 groups; direct sums take 2 groups or more" in str(DEPTHWISE.supports(plain))
    wide = ConvProblem(operation, 32, 9, 9, 16, 3, 3, groups=2)
    assert "a group has up to 16 channels, of 2 groups" in str(DEPTHWISE.supports(wide))
    dilated = depthwise(operation, 4, 400, 3, dilation=(1, 100), padding=(0, 0))
    assert "the filter extends over 201 pixels; direct sums take up to 128" in str(DEPTHWISE.supports(dilated))
    assert DEPTHWISE.supports(depthwise(operation, 4, 40, 31)) is None
