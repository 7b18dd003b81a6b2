"""First layers and narrow images of implicit GEMM, which have register tiles of their own."""

from __future__ import annotations

import pytest
import torch

from mucudnn.kernels.compiled.algorithms import IMPLICIT_GEMM
from mucudnn.kernels.compiled.library import build_name
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.testing.guarded_call import Call
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

pytestmark = pytest.mark.skipif(build_name() == "torch", reason="nothing was compiled")
by_operation = pytest.mark.parametrize("operation", list(Operation))
by_format = pytest.mark.parametrize("memory_format", list(MemoryFormat))

# C, H, W, K, R, S, stride, padding
FIRST_LAYERS = [
    (3, 30, 32, 64, 7, 7, 2, 3),
    (3, 35, 35, 20, 11, 11, 4, 2),
    (3, 12, 28, 13, 3, 3, 1, 1),
    (1, 9, 8, 9, 3, 3, 1, 1),
    (4, 16, 20, 24, 4, 4, 4, 0),
    (2, 11, 70, 7, 3, 5, 3, 2),
]


def error_of(problem: ConvProblem, micro_batches: tuple[int, ...] = (2, 1)) -> float:
    call = Call(problem, sum(micro_batches))
    bias = torch.randn(problem.k) if problem.operation is Operation.FORWARD else None
    expected = reference(problem, call.x, call.w, call.y)
    if bias is not None:
        expected = expected + bias.double().view(1, -1, 1, 1)
    return relative_l2_error(call.run(IMPLICIT_GEMM, list(micro_batches), bias), expected)


@by_operation
@by_format
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("layer", FIRST_LAYERS, ids=str)
def test_first_layers(operation: Operation, memory_format: MemoryFormat, threads: int, layer: tuple[int, ...]) -> None:
    c, h, w, k, r, s, stride, padding = layer
    torch.set_num_threads(threads)
    problem = ConvProblem(
        operation, c, h, w, k, r, s, (stride, stride), (padding, padding), memory_format=memory_format
    )
    assert error_of(problem) < 1e-6


@by_format
@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_FILTER])
def test_rows_of_every_width(operation: Operation, memory_format: MemoryFormat) -> None:
    """Vectors of pixels end where a row ends, whatever its length."""
    for width in range(1, 60):
        problem = ConvProblem(operation, 3, 3, width + 2, 5, 3, 3, memory_format=memory_format)
        assert error_of(problem, (1,)) < 1e-6, width


@by_operation
@by_format
def test_narrow_images_with_many_channels(operation: Operation, memory_format: MemoryFormat) -> None:
    """Register tiles go on across rows, and the inner dimension is taken in parts."""
    for size, stride in ((7, 1), (14, 2), (9, 3), (26, 2)):
        problem = ConvProblem(
            operation, 40, size, size, 24, 3, 3, (stride, stride), (1, 1), memory_format=memory_format
        )
        assert error_of(problem) < 1e-6, (size, stride)
