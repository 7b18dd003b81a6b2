"""What is counted on CUDA of what libraries allocate; a fake stands for the caching allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, linear

from mucudnn.kernels import algorithm as contract
from mucudnn.kernels.algorithm import Algorithm, counted_internal_bytes
from mucudnn.kernels.memory import largest_within

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
            "memory_stats": lambda: {"allocated_bytes.all.current": self.live, "allocated_bytes.all.peak": self.peak},
            "reset_peak_memory_stats": self._reset,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        buffer, activation = contract.aligned_buffer, contract.empty_activation
        monkeypatch.setattr(contract, "aligned_buffer", lambda size, device_type: buffer(size))
        monkeypatch.setattr(
            contract, "empty_activation", lambda problem, shape, device_type: activation(problem, shape)
        )
        monkeypatch.setattr(contract, "_counted", {})

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
        device_type = "cuda"

        def step(self, *_: object) -> None:
            run()

    return Stepping("gemm", FakeClock(), linear(1.0))


def test_what_a_first_run_keeps_is_counted_for_each_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = FakeAllocator(monkeypatch)
    a = stepping(allocator.step)
    assert counted_internal_bytes(a, FORWARD, 2) == WORKSPACE + 1000
    assert counted_internal_bytes(a, FORWARD, 2) == WORKSPACE + 1000
    assert allocator.calls == 2  # and remembered
    assert counted_internal_bytes(a, FORWARD, 4) == WORKSPACE + 1000
    assert allocator.live == WORKSPACE


# Blocks of the caching allocator, against its rules written down

KIB, MIB = 2**10, 2**20


def worst_block(size_bytes: int) -> int:
    """By the rules: in the small pool a rest of 512 bytes is cut off, in the large one only a rest above 1 MiB."""
    rounded = -(-size_bytes // 512) * 512
    return rounded if size_bytes <= MIB else rounded + MIB


@pytest.mark.parametrize(
    "free", [0, 511, 512, 513, 100 * KIB, MIB - 1, MIB, MIB + 1, 2 * MIB - 1, 2 * MIB, 2 * MIB + 512, 5 * MIB + 700]
)
def test_what_fits_fits_in_any_case_and_no_more_would(free: int) -> None:
    largest = largest_within(free, "cuda")
    assert worst_block(largest) <= free
    assert all(worst_block(larger) > free for larger in (largest + 1, largest + 512, largest + MIB + 1))
    assert largest_within(free, "cpu") == free
