"""The compiled algorithm for 1x1 filters: what it takes, and its results at every edge of its blocks."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest
import torch
from support.half_precision import assert_half_is_float32_rounded_once

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.kernels.contract.epilogue import ACTIVATIONS, Epilogue
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.registry import algorithm
from mucudnn.testing.guarded_call import Call
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
by_operation = pytest.mark.parametrize("operation", Operation)
by_format = pytest.mark.parametrize("memory_format", MemoryFormat)
by_threads = pytest.mark.parametrize("threads", [1, 3])
TOLERANCE = 1e-6

# What each is about: sizes of the problem, and the mini-batch.
EDGES: dict[str, tuple[dict[str, Any], int]] = {
    "no tile is full": ({"c": 3, "k": 5, "h": 3, "w": 3}, 2),
    "every tile is full": ({"c": 48, "k": 96, "h": 12, "w": 16}, 2),
    "one more than full tiles": ({"c": 49, "k": 97, "h": 17, "w": 13}, 1),
    "sums in several parts": ({"c": 700, "k": 30, "h": 7, "w": 7}, 3),
    "a gradient too large for copies": ({"c": 401, "k": 402, "h": 5, "w": 9}, 3),
    "many chunks of pixels": ({"c": 20, "k": 9, "h": 47, "w": 45}, 2),
    "images of one pixel": ({"c": 40, "k": 70, "h": 1, "w": 1}, 9),
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
    call = Call(problem, n)
    expected = reference(problem, call.x, call.w, call.y)
    assert relative_l2_error(call.run(algorithm("pointwise"), [n]), expected) < TOLERANCE
    assert call.memory.trespass() is None


@by_operation
@by_format
def test_a_thread_for_every_channel_finds_work_or_none(operation: Operation, memory_format: MemoryFormat) -> None:
    torch.set_num_threads(40)
    problem = ConvProblem(operation, 20, 7, 7, 40, 1, 1, memory_format=memory_format)
    call = Call(problem, 1)
    expected = reference(problem, call.x, call.w, call.y)
    assert relative_l2_error(call.run(algorithm("pointwise"), [1]), expected) < TOLERANCE


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
    prepared, scratch = (torch.empty(size, dtype=torch.uint8) for size in astuple(pointwise.workspace(problem, n)))
    pointwise.open(problem, w, prepared)
    epilogue = Epilogue(activation, added if adds else None)
    pointwise.step(problem, x, w, y, bias, prepared, scratch, epilogue)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4, equal_nan=True)


@by_operation
@by_format
@pytest.mark.parametrize("edge", EDGES)
def test_half_precision_is_float32_rounded_once(operation: Operation, memory_format: MemoryFormat, edge: str) -> None:
    torch.set_num_threads(2)
    sizes, n = EDGES[edge]
    for dtype in ("bfloat16", "float16"):
        problem = ConvProblem(operation, **sizes, r=1, s=1, memory_format=memory_format, dtype=dtype)
        assert_half_is_float32_rounded_once(algorithm("pointwise"), problem, [n - n // 2, n // 2] if n > 1 else [1])


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
