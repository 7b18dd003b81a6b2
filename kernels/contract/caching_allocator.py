"""Tells what CUDA's caching allocator makes of a request, and how many bytes a function requests of it.

It hands out blocks of multiples of 512 bytes. One of at most 1 MiB is cut to size out of a larger one, if need be; of a
larger one a rest of up to 1 MiB is not cut off, which depends on what is cached. ``torch.cuda.max_memory_allocated``
counts whole blocks, ``requested_bytes`` of ``torch.cuda.memory_stats`` what was asked for. All follows ``should_split``
of torch's ``CUDACachingAllocator.cpp``, with the defaults of ``PYTORCH_CUDA_ALLOC_CONF``. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from mucudnn.kernels.contract.allocation import peak_allocated_bytes

BLOCK_BYTES = 512
MOST_IN_SMALL_POOL_BYTES = 2**20
MOST_UNCUT_BYTES = 2**20


def block_bytes(size_bytes: int, device_type: str) -> int:
    """Return the least that an allocator takes for a request: on CUDA whole blocks, elsewhere what is asked for.

    >>> block_bytes(1000, "cuda"), block_bytes(1000, "cpu")
    (1024, 1000)
    """
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES if device_type == "cuda" else size_bytes


def largest_within(free_bytes: int, device_type: str) -> int:
    """Return the largest request for which an allocator takes no more than ``free_bytes``, whatever it has cached."""
    if device_type != "cuda":
        return free_bytes
    small, large = min(free_bytes, MOST_IN_SMALL_POOL_BYTES), free_bytes - MOST_UNCUT_BYTES
    return max(small, large) // BLOCK_BYTES * BLOCK_BYTES


def peak_requested_bytes(function: Callable[[], object], device_type: str) -> int:
    """Count like ``peak_allocated_bytes``, in bytes that were asked for: on CUDA the same whatever is cached.

    Counts on the current device. ``function`` must have run before, if it creates what libraries keep.
    """
    if device_type != "cuda":
        return peak_allocated_bytes(function, device_type)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    function()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return int(after["requested_bytes.all.peak"] - before["requested_bytes.all.current"])
