"""Bands: each algorithm computes any rows, or frames, of a result from those that they read, and writes no others."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from mucudnn.cli.doctor import usable
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.algorithm import Algorithm, why_unsupported
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.memory import aligned_buffer, torch_format
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_convolution import reference
from mucudnn.testing.contract import GEOMETRIES, VOLUMES, geometry


def read_rows(problem: ConvProblem, low: int, high: int) -> tuple[int, int, int]:
    """Return the rows of y (backward data) or x (forward) that rows of the result read, and the padding above."""
    stride, padding = problem.stride[0], problem.padding[0]
    extent = problem.dilation[0] * (problem.window[0] - 1) + 1
    if problem.operation is Operation.FORWARD:
        first = min(max(low * stride - padding, 0), problem.extent[0] - 1)
        last = min(max((high - 1) * stride - padding + extent, first + 1), problem.extent[0])
        return first, last, first - (low * stride - padding)
    rows = problem.y_shape(1)[2]
    first = min(max((low + padding - extent + 1) // stride, 0), rows - 1)
    last = min(max((high - 1 + padding) // stride + 1, first + 1), rows)
    return first, last, padding + low - first * stride


def check(algorithm: Algorithm, problem: ConvProblem, random: Random) -> None:
    is_forward = problem.operation is Operation.FORWARD
    channels_last = torch_format(problem)
    w = torch.randn(problem.w_shape()).contiguous(memory_format=channels_last)
    given = torch.randn(problem.x_shape(1) if is_forward else problem.y_shape(1)).contiguous(
        memory_format=channels_last
    )
    result = torch.zeros(problem.y_shape(1) if is_forward else problem.x_shape(1))
    expected = reference(problem, *((given, w, result) if is_forward else (result, w, given)))
    prepared = aligned_buffer(algorithm.workspace(problem, 1).prepared_bytes)
    algorithm.open(problem, w, prepared)
    rows, align = expected.shape[2], 1 if is_forward else problem.stride[0]
    for _ in range(6):
        low = random.randrange(0, rows, align)
        high = random.randint(low + 1, rows)
        first, last, above = read_rows(problem, low, high)
        made = algorithm.band(
            problem, 1, (last - first, high - low) if is_forward else (high - low, last - first), above
        )
        assert made is not None
        stage, workspace = made
        around = torch.full((1, expected.shape[1], high - low + 2, *expected.shape[3:]), 7.0)
        around = around.contiguous(memory_format=channels_last)
        out, x = around[:, :, 1:-1], given[:, :, first:last]
        addresses = (x, w, out) if is_forward else (out, w, x)
        scratch = aligned_buffer(workspace.scratch_bytes)
        stage(*(one.data_ptr() for one in addresses), None, prepared.data_ptr(), scratch.data_ptr(), None)
        told = f"{algorithm.name}, {problem}, rows {low} to {high}"
        assert_close(out, expected[:, :, low:high], told)
        assert (around[:, :, [0, -1]] == 7).all(), told


def assert_close(found: Tensor, expected: Tensor, told: str) -> None:
    error = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected).clamp_min(1e-3)
    assert error < 1e-4, told


@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA])
def test_bands_are_rows_of_the_whole(operation: Operation) -> None:
    if reason := loaded_build().why_not_compiled:
        pytest.skip(f"only compiled algorithms have bands: {reason}")
    random, tried = Random(0), set()
    for name in (*GEOMETRIES, *VOLUMES):
        problem, _, _ = geometry(name, operation, memory_format=MemoryFormat.CHANNELS_LAST)
        rows = problem.extent[0], problem.positions[0]
        for algorithm in algorithms():
            if not why_unsupported(algorithm, problem) and algorithm.band(problem, 1, rows, problem.padding[0]):
                check(algorithm, problem, random)
                tried.add(algorithm.name)
    images = {"implicit-gemm", "pointwise", "depthwise", "loop-nest", "winograd-4x4", "winograd-4x4-5x5"}
    volumes = {"frames-implicit-gemm", "frames-pointwise", "frames-winograd-4x4", "rows-winograd-4x4"}
    assert tried >= (images | volumes) & {*usable("cpu")}  # x86's plain build has few
