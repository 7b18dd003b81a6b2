"""What is counted on CUDA of what libraries allocate; a fake stands for the caching allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, linear

from mucudnn.kernels.contract import allocation
from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.contract.allocation import counted_internal_bytes

cudnn = torch.backends.cudnn


WORKSPACE = 32 << 20


class FakeAllocator:
    """The caching allocator beside a library that has no workspace at first.

    A call allocates the library's workspace if there is none, and keeps it; it takes and gives back 1000 bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, clears: bool = True) -> None:
        self.live = self.peak = self.calls = self.workspace = 0
        if clears:
            monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self._clear, raising=False)
        for name, stand_in in {
            "current_device": lambda: 0,
            "synchronize": lambda: None,
            "memory_allocated": lambda: self.live,
            "max_memory_allocated": lambda: self.peak,
            "reset_peak_memory_stats": self._reset,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        buffer, activation = allocation.aligned_buffer, allocation.empty_activation
        monkeypatch.setattr(allocation, "aligned_buffer", lambda size, device_type: buffer(size))
        monkeypatch.setattr(
            allocation, "empty_activation", lambda problem, shape, device_type: activation(problem, shape)
        )
        monkeypatch.setattr(allocation, "_counted", {})

    def _reset(self) -> None:
        self.peak = self.live

    def _clear(self) -> None:
        self.live -= self.workspace
        self.workspace = 0

    def step(self) -> None:
        self.calls += 1
        if not self.workspace:
            self.workspace = WORKSPACE
            self.live += WORKSPACE
        self.peak = max(self.peak, self.live + 1000)


def stepping(run: Callable[[], None]) -> Algorithm:
    class Stepping(FakeAlgorithm):
        __slots__ = ()

        def step(self, *_: object) -> None:
            run()

    return Stepping("gemm", FakeClock(), linear(1.0))


def test_what_a_first_run_keeps_is_counted_for_each_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch)
    a = stepping(allocator.step)
    assert counted_internal_bytes(a, FORWARD, 2, "cuda") == WORKSPACE + 1000
    assert counted_internal_bytes(a, FORWARD, 2, "cuda") == WORKSPACE + 1000
    assert allocator.calls == 2  # and remembered
    assert counted_internal_bytes(a, FORWARD, 4, "cuda") == WORKSPACE + 1000
    assert allocator.live == WORKSPACE


def test_where_torch_gives_back_no_workspace_the_first_count_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    a = stepping(FakeAllocator(monkeypatch, clears=False).step)
    assert [counted_internal_bytes(a, FORWARD, n, "cuda") for n in (2, 4)] == [WORKSPACE + 1000, 1000]


def test_it_is_counted_anew_where_torchs_settings_change(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch)
    a = stepping(allocator.step)
    counted_internal_bytes(a, FORWARD, 2, "cuda")
    monkeypatch.setattr(cudnn, "deterministic", True)
    counted_internal_bytes(a, FORWARD, 2, "cuda")
    assert allocator.calls == 4


def test_no_memory_while_counting_is_torchs_error_and_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch)

    def fail() -> None:
        if allocator.calls == 0:
            allocator.calls += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocator.step()

    a = stepping(fail)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        counted_internal_bytes(a, FORWARD, 2, "cuda")
    assert counted_internal_bytes(a, FORWARD, 2, "cuda") == WORKSPACE + 1000
