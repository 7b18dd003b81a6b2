"""Winograd's CUDA functions on a GPU, through CuPy. Also on the CPU where that finds plain mistakes in the tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cuda.either_device import Guarded, captured, run_in_slices, wait_for_all
from support.cuda.emulator import COMPILER, EmulatedLauncher
from support.problems.winograd_backend import WithoutCublas

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.kernels.winograd.cupy_launcher import CupyLauncher

ALGORITHMS = [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5)]
BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def winograd(m: int, r: int, device: str) -> Any:
    if device == "cpu" and COMPILER is None:
        pytest.skip("there is no g++ to run CUDA C++ on the CPU with")
    launcher = EmulatedLauncher() if device == "cpu" else CupyLauncher()
    return WithoutCublas(m, r, launcher=launcher)  # type: ignore[arg-type]


def problem_for(operation: Operation, r: int, **changes: object) -> ConvProblem:
    arguments = {"c": 36, "h": 12, "w": 14, "k": 20, "groups": 2, "padding": (r // 2, 1)} | changes
    return ConvProblem(operation, r=r, s=r, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "m", "r", "dtype"),
    [
        ("cpu", 4, 3, "float32"),
        *(pytest.param("cuda", *of, dtype, marks=pytest.mark.gpu) for of in ALGORITHMS for dtype in BOUNDS),
    ],
)
@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("memory_format", list(MemoryFormat))
def test_result_is_the_convolution_in_the_declared_bytes(
    device: str, m: int, r: int, dtype: str, operation: Operation, memory_format: MemoryFormat
) -> None:
    """Eagerly, and in a CUDA graph, which computes the same bits."""
    problem = problem_for(operation, r, memory_format=memory_format, dtype=dtype)
    memory = Guarded(device)
    operands = memory.operands(problem, 5)
    written = operands.written(operation)
    expected = reference(problem, operands.x, operands.w, operands.y)

    def work() -> None:
        written.zero_()
        run_in_slices(winograd(m, r, device), problem, operands, (2, 2, 1), memory)

    work()
    eager = written.clone()
    replay = captured(work, device)
    replay()
    wait_for_all(device)
    assert torch.equal(written, eager)
    assert relative_l2_error(written, expected) < BOUNDS[dtype] * (10 if m == 6 else 1)
    assert memory.trespass() is None
