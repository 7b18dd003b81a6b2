"""What is assumed of CUDA's caching allocator, against its rules written down; its counters are made up."""

from __future__ import annotations

import pytest
import torch

from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.kernels.contract.caching_allocator import block_bytes, largest_within, peak_requested_bytes

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


def test_requests_are_rounded_on_cuda_alone() -> None:
    assert [block_bytes(size, "cuda") for size in (0, 1, 512, 513, 3 * MIB)] == [0, 512, 512, 1024, 3 * MIB]
    assert block_bytes(513, "cpu") == 513


def test_on_the_cpu_what_is_requested_is_what_is_allocated() -> None:
    def function() -> None:
        torch.empty(1000, dtype=torch.uint8)

    assert peak_requested_bytes(function, "cpu") == peak_allocated_bytes(function) == 1000


def test_on_cuda_the_allocators_counter_of_requests_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"requested_bytes.all.current": 700, "requested_bytes.all.peak": 9000, "allocated_bytes.all.peak": 9999}
    done: list[str] = []

    def reset() -> None:
        done.append("reset")
        stats["requested_bytes.all.peak"] = stats["requested_bytes.all.current"]

    def function() -> None:
        done.append("run")
        stats["requested_bytes.all.peak"] = 1700

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: dict(stats))
    assert peak_requested_bytes(function, "cuda") == 1000
    assert done == ["waited", "reset", "run", "waited"]
