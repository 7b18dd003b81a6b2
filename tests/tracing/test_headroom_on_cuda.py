"""The headroom on CUDA, without one: the allocator's blocks are emulated on the CPU, and devices are fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.cuda.placeholders import MODE, module_on_cuda, on_cuda
from support.hungry import NETS, make_hungry
from torch import Tensor, nn
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from mucudnn.kernels.contract.allocation import block_bytes, peak_allocated_bytes
from mucudnn.tracing import headroom
from mucudnn.tracing import training_step as memory_step
from mucudnn.tracing.headroom import find_headroom, headroom_limits, reference_peak_bytes, torch_inner_bytes
from mucudnn.tracing.training_step import ConvolutionCall, Event, MemoryTimeline, trace_step, training_step
from mucudnn.words.errors import InvalidInputError, UnavailableError
from mucudnn.words.problem import ConvProblem, Operation

MIB = 2**20
PROBLEM = ConvProblem(Operation.FORWARD, c=5, h=9, w=9, k=7, r=3, s=3)


def peak_of_blocks(function: Callable[[], object]) -> int:
    """Of what the CPU's allocator is asked for, as the caching allocator would round it."""
    memory_only = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(memory_only)
    try:
        function()
    finally:
        threads = _disable_profiler_legacy()
    live = peak = 0
    for event in (event for thread in threads for event in thread):
        if str(event.kind()) == "memory_alloc":
            size = event.cpu_memory_usage()
            live += block_bytes(abs(size), "cuda") * (1 if size > 0 else -1)
            peak = max(peak, live)
    return peak


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's storages are traced as if they were in the caching allocator."""
    monkeypatch.setattr(memory_step, "block_bytes", lambda size, device_type: block_bytes(size, "cuda"))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_the_peak_in_blocks_is_not_above_torchs(net: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """With every workspace at its limit, at the same time."""
    model, x = net(), torch.randn(4, 3, 16, 16)

    def step() -> None:
        training_step(model, (x,))
        model.zero_grad(set_to_none=True)

    timeline = trace_step(model, x)
    step()
    torchs_bytes = peak_of_blocks(step)
    assert reference_peak_bytes(timeline, torch_inner_bytes) - timeline.base_bytes <= torchs_bytes
    limits = headroom_limits(timeline, torch_inner_bytes, "cuda")
    assert any(limits.values())
    make_hungry(model, limits, monkeypatch)
    assert peak_of_blocks(step) <= torchs_bytes


def trace_forward(model: nn.Module, x: Tensor) -> MemoryTimeline:
    """Of a step on CUDA the forward pass alone: torch's CPU build has no autograd for it."""
    there, inputs = module_on_cuda(model), (on_cuda(x),)
    with MODE, torch.no_grad():
        return memory_step._trace(there, inputs, None)


def test_a_step_on_cuda_is_counted_in_blocks() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.ReLU(), nn.Conv2d(5, 2, 1))
    x = torch.randn(2, 3, 7, 7)
    timeline = trace_forward(model, x)
    tensors = [*model.parameters(), x]
    assert timeline.base_bytes == sum(block_bytes(t.nbytes, "cuda") for t in tensors) > sum(t.nbytes for t in tensors)
    y_bytes = block_bytes(2 * 5 * 5 * 5 * 4, "cuda")
    first, second = timeline.calls
    assert first.in_use_bytes == timeline.base_bytes + y_bytes
    assert second.in_use_bytes == timeline.base_bytes + y_bytes + block_bytes(2 * 2 * 5 * 5 * 4, "cuda")


def test_limits_leave_room_for_what_the_allocator_does_not_cut_off() -> None:
    in_use = [9 * MIB, 8 * MIB, 4 * MIB]
    calls = tuple(ConvolutionCall(str(index), PROBLEM, 1, size, index) for index, size in enumerate(in_use))
    timeline = MemoryTimeline(0, (Event("relu", 10 * MIB),), calls)
    limits = headroom_limits(timeline, lambda problem, n: 0, "cuda")
    assert list(limits.values()) == [MIB - 1024, MIB, 5 * MIB - 1024]


@pytest.fixture
def cpu_as_cuda(monkeypatch: pytest.MonkeyPatch) -> list[ConvProblem]:
    """Torch's convolutions on CUDA run on the CPU; returns those that were run."""
    runs: list[ConvProblem] = []
    empty, convolution = headroom.empty_activation, headroom.torch_convolution

    def run(operation: Operation, *operands: Any) -> Tensor:
        runs.append(PROBLEM.with_operation(operation))
        return convolution(operation, *operands)

    monkeypatch.setattr(headroom, "empty_activation", lambda problem, shape, device_type: empty(problem, shape))
    monkeypatch.setattr(headroom, "torch_convolution", run)
    monkeypatch.setattr(headroom, "peak_requested_bytes", lambda function, device_type: peak_allocated_bytes(function))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    headroom._counted.cache_clear()
    return runs


def test_torchs_inner_bytes_are_counted_in_a_second_run_for_each_setting(cpu_as_cuda: list[ConvProblem]) -> None:
    for operation in Operation:
        problem = PROBLEM.with_operation(operation)
        counted = torch_inner_bytes(problem, 3, "cuda")
        assert cpu_as_cuda == [problem, problem]
        assert counted == torch_inner_bytes(problem, 3) == torch_inner_bytes(problem, 3, "cuda")
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            torch_inner_bytes(problem, 3, "cuda")
        assert len(cpu_as_cuda) == 5
        cpu_as_cuda.clear()


@pytest.mark.usefixtures("blocks", "cpu_as_cuda")
def test_a_model_on_cuda_is_traced_with_its_device_current(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, current = torch.device("cuda", 1), []

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield

    monkeypatch.setattr(headroom, "device_of", lambda model: gpu)
    monkeypatch.setattr(headroom, "made_current", made_current)
    model, x = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1)), torch.randn(2, 3, 7, 7)
    found = find_headroom(model, x)
    assert current == [gpu]
    assert found.limits == headroom_limits(found.timeline, torch_inner_bytes, "cuda")
    assert any(found.limits.values())


def test_models_elsewhere_are_refused() -> None:
    with pytest.raises(UnavailableError, match="on meta; the headroom is available on cpu and cuda"):
        find_headroom(nn.Conv2d(3, 5, 3, device="meta"), torch.randn(2, 3, 7, 7))
    model = nn.Sequential(nn.Conv2d(3, 5, 3), module_on_cuda(nn.Linear(5, 5)))
    with pytest.raises(InvalidInputError, match="several devices"):
        find_headroom(model, torch.randn(2, 3, 7, 7))
