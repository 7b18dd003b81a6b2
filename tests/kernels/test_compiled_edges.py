"""Pointwise, depthwise and implicit GEMM, compiled: results at every edge of their blocks, and what they refuse."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from support.compiled import algorithm
from support.half_precision import assert_half_is_float32_rounded_once

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.algorithm import ACTIVATIONS, Algorithm, Epilogue
from mucudnn.kernels.compiled.algorithms import IMPLICIT_GEMM
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.memory import TORCH_FORMATS
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.testing.checks import Call, threads

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
by_operation = pytest.mark.parametrize("operation", Operation)
by_format = pytest.mark.parametrize("memory_format", MemoryFormat)
by_threads = pytest.mark.parametrize("threads", [1, 3])
TOLERANCE = 1e-6


def error_of(algorithm: Algorithm, problem: ConvProblem, micro_batches: tuple[int, ...] = (2, 1)) -> float:
    """Relative error of a call, forward with a bias, that has written nowhere else."""
    call = Call(problem, sum(micro_batches))
    bias = torch.randn(problem.k) if problem.operation is Operation.FORWARD else None
    expected = reference(problem, call.x, call.w, call.y, bias)
    error = relative_l2_error(call.run(algorithm, list(micro_batches), bias), expected)
    assert call.memory.trespass() is None
    return error


# What each is about: sizes of the problem, and the mini-batch.
EDGES: dict[str, tuple[dict[str, Any], int]] = {
    "no tile is full": ({"c": 3, "k": 5, "h": 3, "w": 3}, 2),
    "every tile is full": ({"c": 48, "k": 96, "h": 12, "w": 16}, 2),
    "one more than full tiles": ({"c": 49, "k": 97, "h": 17, "w": 13}, 1),
    "sums in several parts": ({"c": 700, "k": 30, "h": 7, "w": 7}, 3),
    "a gradient too large for copies": ({"c": 401, "k": 402, "h": 5, "w": 9}, 3),
    "pixels 4 KiB apart": ({"c": 1024, "k": 1024, "h": 5, "w": 3}, 2),
    "many chunks of pixels": ({"c": 20, "k": 9, "h": 47, "w": 45}, 2),
    "chunks of narrow pixels": ({"c": 24, "k": 144, "h": 23, "w": 20}, 2),
    "images of one pixel": ({"c": 40, "k": 70, "h": 1, "w": 1}, 9),
    "one pixel": ({"c": 520, "k": 150, "h": 1, "w": 1}, 1),
    "few pixels of many channels": ({"c": 300, "k": 600, "h": 1, "w": 7}, 1),
    "images smaller than a vector": ({"c": 9, "k": 10, "h": 1, "w": 3}, 20),
    "stride": ({"c": 12, "k": 20, "h": 15, "w": 18, "stride": (2, 2)}, 3),
    "stride in one direction": ({"c": 12, "k": 20, "h": 33, "w": 40, "stride": (1, 2)}, 2),
    "stride that leaves a border": ({"c": 5, "k": 6, "h": 12, "w": 9, "stride": (5, 4)}, 2),
    "stride to one pixel": ({"c": 5, "k": 6, "h": 2, "w": 3, "stride": (2, 3)}, 3),
    "stride far beyond the map": ({"c": 5, "k": 6, "h": 6, "w": 4, "stride": (100_000, 200_000)}, 2),
    "groups": ({"c": 24, "k": 40, "h": 9, "w": 10, "groups": 2}, 2),
    "groups and stride": ({"c": 30, "k": 15, "h": 9, "w": 10, "groups": 3, "stride": (2, 1)}, 2),
}


@by_operation
@by_format
@by_threads
@pytest.mark.parametrize("edge", EDGES)
def test_it_is_the_convolution(operation: Operation, memory_format: MemoryFormat, threads: int, edge: str) -> None:
    torch.set_num_threads(threads)
    sizes, n = EDGES[edge]
    problem = ConvProblem(operation, **sizes, r=1, s=1, memory_format=memory_format)
    assert error_of(algorithm("pointwise"), problem, (n,)) < TOLERANCE


def test_results_larger_than_the_caches() -> None:
    """Of more than 32 MiB, which are written past the caches where they consist of whole cache lines."""
    torch.set_num_threads(2)
    for operation, c, k in (
        (Operation.FORWARD, 4, 128),
        (Operation.BACKWARD_DATA, 128, 4),
        (Operation.FORWARD, 8, 136),
    ):
        problem = ConvProblem(operation, c, 264, 264, k, 1, 1, memory_format="channels_last")
        assert error_of(algorithm("pointwise"), problem, (1,)) < TOLERANCE


@by_format
@by_threads
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("edge", ["no tile is full", "every tile is full", "one more than full tiles", "a vector more"])
def test_an_epilogue_is_computed_in_every_tile(
    memory_format: MemoryFormat, threads: int, adds: bool, activation: str | None, edge: str
) -> None:
    torch.set_num_threads(threads)
    sizes, n = {**EDGES, "a vector more": ({"c": 300, "k": 40, "h": 9, "w": 11}, 2)}[edge]
    problem = ConvProblem(Operation.FORWARD, **sizes, r=1, s=1, memory_format=memory_format)
    layout, pointwise = TORCH_FORMATS[memory_format], algorithm("pointwise")
    x, w, bias = torch.randn(problem.x_shape(n)), torch.randn(problem.w_shape()), torch.randn(problem.k)
    x[0, :, -1, -1] = torch.nan
    expected = torch.nn.functional.conv2d(x.double(), w.double(), bias.double())
    y, added = torch.empty_like(expected, dtype=torch.float32), torch.randn(expected.shape)
    x, w, y, added = (tensor.contiguous(memory_format=layout) for tensor in (x, w, y, added))
    expected = expected + added if adds else expected
    expected = ACTIVATIONS[activation](expected) if activation else expected
    workspace = pointwise.workspace(problem, n)
    buffers = [torch.empty(size, dtype=torch.uint8) for size in astuple(workspace)]
    stage = pointwise.bound(problem, n, [slice(0, n)], workspace)
    addresses = (tensor.data_ptr() for tensor in (x, w, y, bias, *buffers))
    stage(*addresses, Epilogue(activation, added if adds else None))
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4, equal_nan=True)


@by_operation
@by_format
@pytest.mark.parametrize("edge", EDGES)
def test_half_precision_is_float32_rounded_once(operation: Operation, memory_format: MemoryFormat, edge: str) -> None:
    torch.set_num_threads(2)
    sizes, n = EDGES[edge]
    same_order = operation is not Operation.BACKWARD_FILTER  # narrow pixels of float32 are read in place
    for dtype in ("bfloat16", "float16"):
        problem = ConvProblem(operation, **sizes, r=1, s=1, memory_format=memory_format, dtype=dtype)
        micro_batches = [n - n // 2, n // 2] if n > 1 else [1]
        assert_half_is_float32_rounded_once(algorithm("pointwise"), problem, micro_batches, same_order)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": 3}, "the filter is 3x1; pointwise takes 1x1"),
        ({"padding": (0, 1)}, "the padding is (0, 1); pointwise takes none"),
        ({"groups": 8}, "a group has 2 channels; pointwise takes groups of 4 and more"),
        ({"dtype": "float64"}, "the dtype is float64; this algorithm is compiled for float32, bfloat16, float16"),
    ],
    ids=str,
)
def test_it_says_what_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    problem = {"c": 16, "h": 8, "w": 8, "k": 24, "r": 1, "s": 1} | changes
    assert algorithm("pointwise").supports(ConvProblem(Operation.FORWARD, **problem)) == reason


# Direct sums: every way in which windows are cut, against float64, and what is left to other algorithms.


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
    assert error_of(algorithm("depthwise"), problem) < 2e-6  # long sums of dw


@by_operation
@by_format
@pytest.mark.parametrize(("c", "k", "groups"), [(20, 40, 20), (12, 36, 12), (40, 20, 20), (24, 40, 8), (16, 16, 2)])
def test_multipliers_and_small_groups(
    c: int, k: int, groups: int, memory_format: MemoryFormat, operation: Operation
) -> None:
    for size, taps, stride in ((9, 3, 1), (17, 3, 2), (12, 5, 1)):
        geometry = {"stride": (stride, stride), "padding": (taps // 2, taps // 2), "groups": groups}
        problem = ConvProblem(operation, c, size, size, k, taps, taps, **geometry, memory_format=memory_format)
        assert error_of(algorithm("depthwise"), problem, (2,)) < 1e-6


@by_operation
@by_format
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", WINDOWS)
def test_half_precision_of_windows_is_float32_rounded_once(
    case: str, dtype: str, memory_format: MemoryFormat, operation: Operation
) -> None:
    channels, size, taps, changes = WINDOWS[case]
    problem = depthwise(operation, channels, size, taps, memory_format=memory_format, dtype=dtype, **changes)
    assert_half_is_float32_rounded_once(algorithm("depthwise"), problem, [2, 1])


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
            results.append(Call(problem, 5).run(algorithm("depthwise"), [5]).clone())
    assert all(torch.equal(results[0], other) for other in results[1:])


@by_operation
def test_what_is_left_to_other_algorithms_has_a_reason(operation: Operation) -> None:
    direct_sums, plain = algorithm("depthwise"), ConvProblem(operation, 8, 9, 9, 8, 3, 3)
    assert "of 1 groups; direct sums take 2 groups or more" in str(direct_sums.supports(plain))
    wide = ConvProblem(operation, 32, 9, 9, 16, 3, 3, groups=2)
    assert "a group has up to 16 channels, of 2 groups" in str(direct_sums.supports(wide))
    dilated = depthwise(operation, 4, 400, 3, dilation=(1, 100), padding=(0, 0))
    assert "the filter extends over 201 pixels; direct sums take up to 128" in str(direct_sums.supports(dilated))
    assert direct_sums.supports(depthwise(operation, 4, 40, 31)) is None


# First layers and narrow images of implicit GEMM, which have register tiles of their own.


# C, H, W, K, R, S, stride, padding
@by_format
@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_FILTER])
def test_rows_of_every_width(operation: Operation, memory_format: MemoryFormat) -> None:
    """Vectors of pixels end where a row ends, whatever its length."""
    for width in range(1, 60):
        problem = ConvProblem(operation, 3, 3, width + 2, 5, 3, 3, memory_format=memory_format)
        assert error_of(IMPLICIT_GEMM, problem, (1,)) < 1e-6, width


def test_threads_take_tasks_of_images_that_caches_cannot_hold() -> None:
    """Small images, as elsewhere here, are divided into equal shares."""
    for name, size in (("pointwise", 1), ("depthwise", 3), ("implicit-gemm", 3), ("winograd-4x4", 3)):
        groups = 16 if name == "depthwise" else 1
        for operation in (Operation.FORWARD, Operation.BACKWARD_DATA):
            sizes = {"c": 16, "h": 270, "w": 260, "k": 16, "r": size, "s": size, "groups": groups}
            problem = ConvProblem(operation, **sizes, memory_format=MemoryFormat.CHANNELS_LAST)
            with threads(2):
                assert error_of(algorithm(name), problem, (1,)) < 1e-5, f"{name}, {operation}"
