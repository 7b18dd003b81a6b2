"""A context in which glibc does not return heap memory to the system, so that timed calls get no fresh pages.

glibc returns the end of its heap to the system when much of it is free, and the next call pays for fresh pages. Whether
this happens depends on the blocks at the end of the heap: PyTorch's 1x1 convolution took 13 ms in one process and 6 ms
in another. See docs/memory.md.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from malloc.h
_EVERYTHING = 2**31 - 1
_GROWN_MMAP, _GROWN_TRIM = 32 * 2**20, 64 * 2**20  # values that glibc's dynamic thresholds reach with large tensors
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")

_lock = Lock()
_inside = 0


@contextmanager
def kept_heap() -> Iterator[None]:
    """Keep glibc from returning free heap memory to the system inside the context, so that no call gets new pages.

    Afterwards glibc's thresholds have the values that they reach in programs with large tensors. This does nothing
    without glibc, or if the user has set the thresholds by environment variables.
    """
    global _inside
    with _lock:
        _inside += 1
        _set_thresholds()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            _set_thresholds()


def _set_thresholds() -> None:
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _GROWN_MMAP)
        mallopt(_TRIM_THRESHOLD, _EVERYTHING if _inside else _GROWN_TRIM)


def _mallopt() -> Callable[[int, int], int] | None:
    is_set = any(name in os.environ for name in _SET_BY_USER) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if is_set or os.name != "posix":
        return None
    return getattr(ctypes.CDLL(None), "mallopt", None)
