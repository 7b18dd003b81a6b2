"""Measures the memory that a call takes: in torch's allocator, and by which the process grows."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.running.workspace import release_workspaces

T = TypeVar("T")
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def allocator_peak_bytes(step: Callable[[], object], device_type: str = "cpu") -> int:
    """Return the peak bytes that torch's allocator holds during ``step``, beyond those allocated before the step.

    A warm-up step runs first, in which libraries allocate the memory that they keep. Then mucudnn's CPU workspace is
    released, so that it counts towards the peak, and the cache of the current CUDA device is emptied, because cached
    blocks change the peak.
    """
    step()
    release_workspaces()
    if device_type == "cuda":
        torch.cuda.empty_cache()
    return peak_allocated_bytes(step, device_type)


def resident_growth(call: Callable[[], T]) -> tuple[T, int | None]:
    """Call a function for the first time; return its result, and the bytes by which the process grew meanwhile.

    mucudnn's workspace is released before, and so is what the C library keeps. None on systems other than Linux.
    """
    if not _RESET.exists():
        return call(), None
    release_workspaces()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status_bytes("VmRSS")
    _RESET.write_text("5")
    result = call()
    return result, max(_status_bytes("VmHWM") - before, 0)


def _status_bytes(field: str) -> int:
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 2**10
