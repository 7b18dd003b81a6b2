"""Plans are built once and executed with little, for each device and thread; this cuDNN computes nothing."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.cudnn.library import BAD_PARAM, FakeCudnn, FakeEngine, workspace_of

from mucudnn.core.errors import CapturingError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.cudnn import backend as module
from mucudnn.kernels.cudnn.backend import CudnnBackend, EngineConfig, Plan, Pointers
from mucudnn.kernels.cudnn.descriptor import Attribute, DescriptorKind, HeuristicMode
from mucudnn.kernels.cudnn.library import CudnnError, Library

PROBLEM = ConvProblem(Operation.BACKWARD_FILTER, 4, 8, 8, 4, 3, 3)
PLAN, ADDING, OTHER = (
    Plan(EngineConfig(2), PROBLEM, 4),
    Plan(EngineConfig(2), PROBLEM, 4, 1.0),
    Plan(EngineConfig(0), PROBLEM, 2),
)
POINTERS = Pointers(0x100, 0x200, 0x300)


@dataclass
class Cuda:
    """The runtime: its current device, and whether the current stream is captured."""

    device: int = 0
    is_capturing: bool = False


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda.device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.is_capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return cuda


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    cudnn = FakeCudnn((FakeEngine(0), FakeEngine(2)), {HeuristicMode.A: [(2, ()), (0, ())]})
    monkeypatch.setattr(ctypes, "CDLL", lambda path: cudnn)
    loaded = Library("fake")
    monkeypatch.setattr(module, "library", lambda: loaded)
    return cudnn


@pytest.fixture
def backend(cudnn: FakeCudnn, cuda: Cuda) -> CudnnBackend:
    return CudnnBackend()


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
    gc.collect()


def test_a_plan_that_needs_more_workspace_than_was_said_allocates_its_own(
    backend: CudnnBackend, cudnn: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated: list[torch.Tensor] = []

    def empty(size: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        allocated.append(torch.zeros(size, dtype=dtype))
        return allocated[-1]

    monkeypatch.setattr(torch, "empty", empty)
    cudnn.unsaid_bytes = 1
    assert backend.engine(PLAN).workspace_bytes == workspace_of(2, ())
    assert backend.own_bytes(PLAN) == workspace_of(2, ()) + 1
    gc.collect()
    assert not any(made.kind == DescriptorKind.EXECUTION_PLAN for made in cudnn.alive.values())  # it was only asked
    for _ in range(2):
        backend.execute(PLAN, POINTERS, 0x400, 0)
    assert [len(workspace) for workspace in allocated] == [workspace_of(2, ()) + 1] * 2
    handed = [pack[Attribute.VARIANT_PACK_WORKSPACE] for _, _, pack in cudnn.executed]
    assert handed == [[workspace.data_ptr()] for workspace in allocated]
    cudnn.unsaid_bytes = -1
    backend.execute(OTHER, POINTERS, 0x400, 0)
    assert backend.own_bytes(OTHER) == 0
    assert cudnn.executed[-1][2][Attribute.VARIANT_PACK_WORKSPACE] == [0x400]


def test_plans_of_a_search_are_given_back_and_those_of_before_stay(backend: CudnnBackend, cudnn: FakeCudnn) -> None:
    def plans() -> int:
        gc.collect()
        return sum(made.kind == DescriptorKind.EXECUTION_PLAN for made in cudnn.alive.values())

    backend.execute(PLAN, POINTERS, 0x400, 0)
    with backend.building_for_a_while():
        for plan in (PLAN, OTHER, ADDING):
            backend.execute(plan, POINTERS, 0x400, 0)
        assert plans() == 4
    assert plans() == 1
    backend.execute(OTHER, POINTERS, 0x400, 0)
    assert plans() == 2
    built = cudnn.kinds().count(DescriptorKind.EXECUTION_PLAN)
    backend.execute(PLAN, POINTERS, 0x400, 0)
    assert cudnn.kinds().count(DescriptorKind.EXECUTION_PLAN) == built == 5


def test_every_device_has_its_own_handle_plans_and_stream(backend: CudnnBackend, cudnn: FakeCudnn, cuda: Cuda) -> None:
    for device, stream in ((0, 5), (1, 5), (0, 5), (1, 5)):
        cuda.device = device
        backend.execute(PLAN, POINTERS, 0x400, stream)
    handles = [handle for handle, _, _ in cudnn.executed]
    assert handles[0] != handles[1]
    assert handles == handles[:2] * 2
    assert [plan[Attribute.EXECUTION_PLAN_HANDLE] for _, plan, _ in cudnn.executed] == [[handle] for handle in handles]
    assert cudnn.streams == [(handles[0], 5), (handles[1], 5)]


def test_while_a_graph_is_captured_nothing_is_built(backend: CudnnBackend, cudnn: FakeCudnn, cuda: Cuda) -> None:
    backend.build(PLAN)
    made = len(cudnn.made)
    cuda.is_capturing = True
    backend.execute(PLAN, POINTERS, 0x400, 0)
    with pytest.raises(CapturingError, match=r"the plan of cudnn:0 for 2 sample\(s\) cannot be created while"):
        backend.execute(OTHER, POINTERS, 0x400, 0)
    assert cudnn.kinds()[made:] == [DescriptorKind.VARIANT_PACK]
    in_a_thread(lambda: backend.execute(PLAN, POINTERS, 0x400, 0))
    assert len(cudnn.executed) == 2
    cuda.device = 1
    with pytest.raises(CapturingError, match="cuDNN's handle cannot be created while"):
        backend.execute(PLAN, POINTERS, 0x400, 0)
    assert cudnn.calls.count("cudnnCreate") == 1


def test_what_cudnn_cannot_compute_is_not_offered(backend: CudnnBackend, cudnn: FakeCudnn) -> None:
    assert [engine.config for engine in backend.offered(PROBLEM, 4)] == [EngineConfig(2), EngineConfig(0)]
    made = len(cudnn.made)
    in_a_thread(lambda: backend.offered(PROBLEM, 4))
    assert len(cudnn.made) == made
    cudnn.refused["cudnnBackendFinalize"] = (3000, b"")
    assert backend.offered(PROBLEM, 8) == []
    cudnn.refused["cudnnBackendFinalize"] = (BAD_PARAM, b"wrong")
    with pytest.raises(CudnnError, match="wrong"):
        backend.offered(PROBLEM, 16)
