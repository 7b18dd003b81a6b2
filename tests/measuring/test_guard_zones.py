"""Buffers between guard zones: what is written around them is noticed, and they never exist twice."""

from __future__ import annotations

import pytest
import torch

from mucudnn.kernels.contract.algorithm import ALIGNMENT_BYTES
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.measuring import guard_zones
from mucudnn.measuring.guard_zones import GUARD_BYTES, GuardedBuffer

SIZE = 100


@pytest.fixture
def buffer() -> GuardedBuffer:
    buffer = GuardedBuffer("cpu")
    buffer.require(1000)
    buffer.arm(SIZE)
    return buffer


def write(buffer: GuardedBuffer, start: int, count: int) -> None:
    """``start``: from the begin of the part."""
    everything = torch.empty(0, dtype=torch.uint8).set_(buffer.part(SIZE).untyped_storage())
    everything[GUARD_BYTES + start : GUARD_BYTES + start + count] = 0


def test_writing_all_of_a_part_is_no_trespass(buffer: GuardedBuffer) -> None:
    write(buffer, 0, SIZE)
    assert buffer.trespass(SIZE) is None


@pytest.mark.parametrize(
    ("start", "count", "where"),
    [
        (-1, 1, "1 bytes, from 1 bytes before the begin"),
        (-GUARD_BYTES, 8, f"8 bytes, from {GUARD_BYTES} bytes before the begin"),
        (SIZE, 4, "4 bytes, up to 4 bytes behind the end"),  # within the buffer: it is the part that is guarded
        (SIZE + GUARD_BYTES - 1, 1, f"1 bytes, up to {GUARD_BYTES} bytes behind the end"),
    ],
)
def test_every_byte_of_both_zones_is_watched(buffer: GuardedBuffer, start: int, count: int, where: str) -> None:
    write(buffer, start, count)
    assert buffer.trespass(SIZE) == where
    buffer.arm(SIZE)
    assert buffer.trespass(SIZE) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_before_a_run_a_part_is_not_a_number_and_aligned(buffer: GuardedBuffer, dtype: torch.dtype) -> None:
    buffer.arm(96)
    assert buffer.part(96).view(dtype).isnan().all()
    assert buffer.part(96).data_ptr() % ALIGNMENT_BYTES == 0


def test_it_grows_by_giving_back_first() -> None:
    buffer = GuardedBuffer("cpu")

    def grow() -> None:
        for size in (2**20, 2**24, 2**26):
            assert buffer.require(size)
            buffer.part(size)

    assert peak_allocated_bytes(grow) == 2**26 + 2 * GUARD_BYTES
    assert not buffer.require(2**24)


def test_what_cannot_grow_stays_as_large_as_it_was(buffer: GuardedBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def refuse(size: int, **how: object) -> torch.Tensor:
        if size > 10**9:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(size, **how)

    monkeypatch.setattr(guard_zones.torch, "empty", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        buffer.require(10**9)
    assert buffer.capacity_bytes == 1000
    assert buffer.part(SIZE).numel() == SIZE
