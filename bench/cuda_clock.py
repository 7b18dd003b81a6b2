"""The clock of a CUDA device: events on the current stream, behind a flushed L2 cache."""

from __future__ import annotations

import subprocess
import time
import warnings
from collections.abc import Callable

import torch

from mucudnn.bench.timer import Clock

_L2_FACTOR = 2  # the flush writes as much more than the cache holds
_CHECK_EVERY_S = 30.0
# Bits of NVML's clocks throttle reasons that make an equal run slower; being idle, or set clocks, does not.
_THROTTLING = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class CudaClock(Clock):
    """Times what runs on the current device and stream.

    Between samples a buffer larger than the L2 cache is written, so that each finds it without its operands. Where the
    device slows itself down there is a warning. Not verified on a GPU: the events' resolution with short samples,
    whether launching keeps ahead of the device, and nvidia-smi's query.
    """

    def __init__(self) -> None:
        cache_bytes = torch.cuda.get_device_properties().L2_cache_size
        self._flushed = torch.empty(_L2_FACTOR * cache_bytes, dtype=torch.uint8, device="cuda")
        self._next_check_s = time.perf_counter()

    def now(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    def time(self, function: Callable[[], object], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flushed.fill_(1)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        self._check()
        return float(start.elapsed_time(end)) / 1000

    def _check(self) -> None:
        if time.perf_counter() < self._next_check_s:
            return
        if reasons := throttling(_throttle_reasons()):
            warnings.warn(f"the GPU's clocks are throttled ({reasons}): what is measured now is too slow", stacklevel=2)
        self._next_check_s = time.perf_counter() + _CHECK_EVERY_S


def throttling(reasons: str) -> str:
    """In words, what nvidia-smi gives as a mask (``0x0000000000000004``); empty: nothing, or it gives none."""
    try:
        mask = int(reasons.strip(), 16)
    except ValueError:
        return ""
    return ", ".join(name for bit, name in _THROTTLING.items() if mask & bit)


def _throttle_reasons() -> str:
    device = f"GPU-{torch.cuda.get_device_properties().uuid}"
    command = ["nvidia-smi", "-i", device, "--query-gpu=clocks_throttle_reasons.active", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
