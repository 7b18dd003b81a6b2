"""``run`` against torch in float64, and the order in which it calls an algorithm."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.configured import run
from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace
from mucudnn.kernels.memory import ALIGNMENT_BYTES, TORCH_FORMATS
from mucudnn.kernels.torch_convolution import torch_convolution
from mucudnn.running import executable as executables
from mucudnn.running import workspace
from mucudnn.running.executable import Executable
from mucudnn.running.workspace import release_workspaces

Calls = list[tuple[Any, ...]]

PROBLEM = ConvProblem(Operation.FORWARD, 4, 9, 7, 6, 3, 3, padding=(1, 0), groups=2)


def configuration(*micro_configs: tuple[str, int]) -> Configuration:
    return Configuration(tuple(MicroConfig(*m) for m in micro_configs), time_s=1.0, workspace_bytes=0)


def operands(problem: ConvProblem, n: int) -> tuple[Tensor, Tensor, Tensor]:
    torch_format = TORCH_FORMATS[problem.memory_format]
    shapes = problem.x_shape(n), problem.w_shape(), problem.y_shape(n)
    x, w, y = (torch.randn(shape).contiguous(memory_format=torch_format) for shape in shapes)
    return x, w, y


@dataclass
class Recorder(BaseAlgorithm):
    """An algorithm that writes down what it is handed, and computes nothing."""

    name: str
    prepared_bytes: int
    scratch_bytes: int
    calls: Calls = field(default_factory=list)
    version: int = 1
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return "it is square" if problem.h == problem.w else None

    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        return None

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        return Workspace(self.prepared_bytes, self.scratch_bytes * micro_batch_size)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        raise AssertionError("to run is to allocate them: they are not asked for beforehand")

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        self.calls.append(("open", self.name, prepared))

    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, *rest: Tensor) -> None:
        _, prepared, scratch = rest
        assert len(x) == len(y)
        self.calls.append(("step", self.name, x[:, 0, 0, 0].tolist(), prepared, scratch))

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        self.calls.append(("close", self.name, prepared))


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Registers the algorithms "a" and "b"; their calls."""
    a = Recorder("a", prepared_bytes=100, scratch_bytes=10)
    b = Recorder("b", prepared_bytes=0, scratch_bytes=65, calls=a.calls)
    monkeypatch.setattr(executables, "algorithm_named", lambda name, device_type: {"a": a, "b": b}[name])
    return a.calls


@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("parts", [[("gemm", 5)], [("gemm", 2), ("gemm", 2), ("native", 1)], [("native", 5)]])
def test_run_computes_the_convolution(
    operation: Operation, memory_format: MemoryFormat, parts: list[tuple[str, int]]
) -> None:
    problem = replace(PROBLEM, operation=operation, memory_format=memory_format)
    x, w, y = operands(problem, 5)
    bias = torch.randn(6) if operation is Operation.FORWARD else None
    expected = torch_convolution(
        operation,
        *(x.double(), w.double(), y.double() if bias is None else bias.double()),
        (problem.stride, problem.padding, problem.dilation, problem.groups),
    )
    written = {Operation.FORWARD: y, Operation.BACKWARD_DATA: x, Operation.BACKWARD_FILTER: w}[operation]

    run(problem, configuration(*parts), x, w, y, bias)

    torch.testing.assert_close(written.double(), expected, rtol=1e-5, atol=1e-5, check_stride=False)


def test_algorithms_are_opened_stepped_over_their_slices_and_closed_in_turn(recorders: Calls) -> None:
    x, w, y = operands(PROBLEM, 6)
    x[:, 0, 0, 0] = torch.arange(6)
    run(PROBLEM, configuration(("a", 2), ("a", 1), ("b", 2), ("b", 1)), x, w, y)
    order = [call[:2] if call[0] != "step" else call[:3] for call in recorders]
    assert order == [
        *(("open", "a"), ("step", "a", [0, 1]), ("step", "a", [4]), ("close", "a")),
        *(("open", "b"), ("step", "b", [2, 3]), ("step", "b", [5]), ("close", "b")),
    ]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 40)), min_size=1, max_size=12))
def test_slices_cover_the_batch_and_begin_on_powers_of_two_of_their_sizes(parts: list[tuple[str, int]]) -> None:
    """Whatever runs when. cuDNN's engines count on it: see test_cudnn_descriptors.py."""
    named = {name: Recorder(name, 0, 0) for name in "ab"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executables, "algorithm_named", lambda name, device_type: named[name])
        executable = Executable.of(PROBLEM, configuration(*parts))
    run_in_turn = {stage.algorithm.name: stage.slices for stage in executable.stages}
    for name, slices in run_in_turn.items():
        assert [s.stop - s.start for s in slices] == [size for other, size in parts if other == name]
        for s in slices:
            power = max(2**k for k in range(6) if (s.stop - s.start) % 2**k == 0)
            assert s.start % power == 0
    samples = sorted(n for slices in run_in_turn.values() for s in slices for n in range(s.start, s.stop))
    assert samples == list(range(sum(size for _, size in parts)))


def test_workspace_is_prepared_buffers_then_the_largest_scratch(recorders: Calls) -> None:
    executable = Executable.of(PROBLEM, configuration(("a", 2), ("b", 2), ("b", 1)))
    executable.execute(*operands(PROBLEM, 5))
    opened = [call[2] for call in recorders if call[0] == "open"]
    scratches = {(call[4].data_ptr(), call[4].numel()) for call in recorders if call[0] == "step"}
    assert [prepared.numel() for prepared in opened] == [100, 0]
    assert executable.workspace_bytes == 256 + 130
    ((scratch_address, scratch_bytes),) = scratches
    assert scratch_bytes == 130
    assert scratch_address == opened[0].data_ptr() + 256
    assert scratch_address % ALIGNMENT_BYTES == 0


def test_cpu_workspace_is_kept_grown_and_released(recorders: Calls) -> None:
    def address_of(parts: tuple[str, int]) -> int:
        recorders.clear()
        Executable.of(PROBLEM, configuration(parts)).execute(*operands(PROBLEM, parts[1]))
        address: int = recorders[1][4].data_ptr()
        return address

    release_workspaces()
    large = address_of(("b", 9))
    assert address_of(("b", 1)) == address_of(("b", 9)) == large
    kept = workspace.kept_by_each_thread.workspace
    assert kept.buffer is not None
    assert kept.buffer.numel() == 9 * 65
    release_workspaces()
    assert kept.buffer is None
    large = address_of(("b", 9))
    with ThreadPoolExecutor(1) as pool:  # another thread has its own
        assert pool.submit(address_of, ("b", 9)).result() != large


def test_workspace_serves_training_after_inference_mode_and_is_the_cpus_whatever_the_default_is() -> None:
    release_workspaces()
    x, w, y = operands(PROBLEM, 2)
    with torch.inference_mode():
        run(PROBLEM, configuration(("gemm", 1), ("gemm", 1)), x, w, torch.empty_like(y))
    run(PROBLEM, configuration(("gemm", 1), ("gemm", 1)), x, w, y)
    release_workspaces()
    with torch.device("meta"):
        run(PROBLEM, configuration(("implicit-gemm", 2)), x, w, y)
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, w, None, padding=(1, 0), groups=2))


def test_algorithm_that_cannot_is_refused_with_its_reason(recorders: Calls) -> None:
    with pytest.raises(InvalidInputError, match=r"'a' cannot compute .*: it is square"):
        Executable.of(replace(PROBLEM, w=9), configuration(("a", 1)))
