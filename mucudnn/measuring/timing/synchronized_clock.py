"""Clock of what a user waits for on a CUDA device, Python and launching included."""

from __future__ import annotations

import time

import torch

from mucudnn.measuring.timing.timer import Clock, WallClock


class SynchronizedClock(Clock):
    """Wall time, read once the current device has finished. Calls of one sample follow each other without waiting.

    ``CudaClock`` times the device alone, and tries to leave launching out. Not run on a GPU yet.
    """

    def now(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()


def wall_clock(device: str) -> Clock:
    """The clock of what a user waits for on a device (``cpu`` or ``cuda``)."""
    return SynchronizedClock() if device == "cuda" else WallClock()
