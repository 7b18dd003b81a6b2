"""Winograd's CUDA functions on a GPU, through CuPy. Also on the CPU where that finds plain mistakes in the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from support.cuda.emulator import COMPILER, EmulatedLauncher
from support.problems.winograd_backend import OnBackend
from torch import Tensor

from mucudnn.kernels.contract.buffers import empty_activation
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.cuda.cupy_launcher import CupyLauncher
from mucudnn.kernels.winograd.cook_toom import cook_toom
from mucudnn.kernels.winograd.cuda_backend import CudaWinograd
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

BOUNDS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
MARGIN_BYTES, PATTERN = 256, 0xA5


@dataclass(frozen=True)
class Place:
    device: str
    launcher: CupyLauncher | EmulatedLauncher


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    if request.param == "cpu":
        if COMPILER is None:
            pytest.skip("there is no g++ to run CUDA C++ on the CPU with")
        return Place("cpu", EmulatedLauncher())
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return Place("cuda", CupyLauncher())


class Run:
    """Operands and workspace on a device; a call computes the operation on slices of the mini-batch."""

    def __init__(self, place: Place, m: int, problem: ConvProblem, micro_batches: Sequence[int]) -> None:
        self.problem, self.micro_batches = problem, micro_batches
        self.algorithm = OnBackend(CudaWinograd(place.launcher), cook_toom(m, problem.r))
        n = sum(micro_batches)
        shapes = (problem.x_shape(n), problem.w_shape(), problem.y_shape(n))
        self.x, self.w, self.y = (empty_activation(problem, shape, place.device).normal_() for shape in shapes)
        self.bias = self.y.new_empty(problem.k).normal_() if problem.operation is Operation.FORWARD else None
        self.expected = reference(problem, *(t.cpu() for t in (self.x, self.w, self.y)), self._bias_on_cpu())
        workspaces = [self.algorithm.workspace(problem, n) for n in micro_batches]
        self._prepared = self._buffer(max(w.prepared_bytes for w in workspaces))
        self._scratch = self._buffer(max(w.scratch_bytes for w in workspaces))

    def __call__(self) -> None:
        problem, algorithm = self.problem, self.algorithm
        if problem.operation is Operation.BACKWARD_FILTER:
            self.w.zero_()
        prepared, scratch = (buffer[MARGIN_BYTES:-MARGIN_BYTES] for buffer in (self._prepared, self._scratch))
        algorithm.open(problem, self.w, prepared)
        start = 0
        for n in self.micro_batches:
            x, y = self.x[start : start + n], self.y[start : start + n]
            algorithm.step(problem, x, self.w, y, self.bias, prepared, scratch)
            start += n
        algorithm.close(problem, self.w, prepared)

    @property
    def written(self) -> Tensor:
        by_operation = {Operation.FORWARD: self.y, Operation.BACKWARD_DATA: self.x, Operation.BACKWARD_FILTER: self.w}
        return by_operation[self.problem.operation]

    @property
    def error(self) -> float:
        return relative_l2_error(self.written.cpu(), self.expected)

    @property
    def margins_are_intact(self) -> bool:
        margins = (
            b[part]
            for b in (self._prepared, self._scratch)
            for part in (slice(MARGIN_BYTES), slice(-MARGIN_BYTES, None))
        )
        return all(bool((margin == PATTERN).all()) for margin in margins)

    def _bias_on_cpu(self) -> Tensor | None:
        return None if self.bias is None else self.bias.cpu()

    def _buffer(self, size_bytes: int) -> Tensor:
        return torch.full((size_bytes + 2 * MARGIN_BYTES,), PATTERN, dtype=torch.uint8, device=self.x.device)


def problem_for(operation: Operation, r: int, **changes: object) -> ConvProblem:
    arguments = {"c": 36, "h": 12, "w": 14, "k": 20, "groups": 2, "padding": (r // 2, 1)} | changes
    return ConvProblem(operation, r=r, s=r, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "m", "r"),
    [
        ("cpu", 4, 3),
        *(pytest.param("cuda", m, r, marks=pytest.mark.gpu) for m, r in [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5)]),
    ],
    indirect=["place"],
)
@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("memory_format", list(MemoryFormat))
@pytest.mark.parametrize("dtype", BOUNDS)
def test_result_is_the_convolution_in_the_declared_bytes(
    place: Place, m: int, r: int, operation: Operation, memory_format: MemoryFormat, dtype: str
) -> None:
    run = Run(place, m, problem_for(operation, r, memory_format=memory_format, dtype=dtype), [2, 2, 1])
    run()
    assert run.error < BOUNDS[dtype] * (10 if m == 6 else 1)
    assert run.margins_are_intact


@pytest.mark.gpu
@pytest.mark.parametrize("operation", list(Operation))
def test_a_captured_graph_computes_the_same(operation: Operation) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    run = Run(Place("cuda", CupyLauncher()), 4, problem_for(operation, 3), [2, 1])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and lets cuBLAS take its workspace
        run()
    torch.cuda.current_stream().wait_stream(side)
    eager = run.written.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    run.written.zero_()
    graph.replay()
    assert torch.equal(run.written, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("memory_format", list(MemoryFormat))
def test_nothing_is_allocated_and_every_run_gives_the_same_bits(
    operation: Operation, memory_format: MemoryFormat
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    run = Run(Place("cuda", CupyLauncher()), 4, problem_for(operation, 3, memory_format=memory_format), [2, 1])
    run()
    first = run.written.clone()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    assert torch.equal(run.written, first)
