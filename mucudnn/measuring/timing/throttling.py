"""Reasons why a GPU runs slower than it could, from NVML, which comes with every driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

_POWER_CAP = 0x04
# Bits of NVML's clocks event reasons that slow down a run. Idle and fixed clocks do not.
_THROTTLING = {
    _POWER_CAP: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# Two names of one function: drivers before 535 have only the second, which CUDA 14 will drop.
_FUNCTIONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")


def throttling(reasons: int) -> str:
    """Return the active throttling reasons, comma-separated; empty if there are none.

    >>> throttling(0x04 | 0x40)
    'power cap, hardware thermal slowdown'
    """
    return ", ".join(name for bit, name in _THROTTLING.items() if reasons & bit)


def slows_down(reasons: int) -> bool:
    """Whether the bit mask has a reason other than the power cap, which a busy GPU usually reaches."""
    return any(reasons & bit for bit in _THROTTLING if bit != _POWER_CAP)


def current_reasons(uuid: str) -> int:
    """Return NVML's bit mask of why the clocks of the GPU with this UUID (``GPU-...``) are reduced; 0 if unknown.

    A call takes some microseconds. Call it while the GPU is busy: an idle GPU reports no reasons.
    """
    device, ask = _device(uuid)
    mask = ctypes.c_ulonglong()
    return mask.value if device and ask is not None and ask(device, ctypes.byref(mask)) == 0 else 0


@cache
def _device(uuid: str) -> tuple[ctypes.c_void_p, Callable[..., int] | None]:
    """Return NVML's handle of the GPU, and the function that reads the reasons; null if NVML or the GPU is missing."""
    device = ctypes.c_void_p()
    nvml = _nvml()
    if nvml is None or nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
        return ctypes.c_void_p(), None
    return device, next((getattr(nvml, name) for name in _FUNCTIONS if hasattr(nvml, name)), None)


def _nvml() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
