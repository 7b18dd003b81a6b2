"""Large results on huge pages.

The first touch of fresh memory costs a page fault for each 4 KiB, and a large result is fresh memory in every call: for
the first layers of VGG-16 that costs as much as their convolution. Linux backs a range with pages of 2 MiB where it is
asked to (``madvise``; the usual setting of /sys/kernel/mm/transparent_hugepage/enabled), with 512 times fewer faults.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

from torch import Tensor

_HUGE_PAGE_BYTES = 2 * 2**20
_SMALLEST_BYTES = 2 * _HUGE_PAGE_BYTES  # below, the allocator mostly has pages that were touched before
_MADV_HUGEPAGE = 14


def on_huge_pages(tensor: Tensor) -> Tensor:
    """The same tensor; if it is large, dense, on the CPU, and this is Linux, its whole huge pages are asked for."""
    if tensor.device.type == "cpu" and tensor.numel() * tensor.itemsize >= _SMALLEST_BYTES:
        start, size = tensor.data_ptr(), tensor.numel() * tensor.itemsize
        first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        length = (start + size) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - first
        if length > 0:
            _advise()(first, length, _MADV_HUGEPAGE)  # a refusal changes nothing but the speed
    return tensor


@cache
def _advise() -> Callable[[int, int, int], int]:
    if not sys.platform.startswith("linux"):
        return lambda start, length, advice: 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return madvise
