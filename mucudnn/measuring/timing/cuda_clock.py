"""Clocks for CUDA: one times the device alone with events and a flushed L2 cache, the other the user's waiting time."""

from __future__ import annotations

import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from mucudnn.measuring.timing.timer import Clock, StoppingRule, WallClock

_L2_FACTOR = 2  # the flush writes this many times the cache size
_CYCLES_PER_S = 2e9  # an upper bound for all devices
_LEAD = 2.0  # the device waits this many times the previous launch time
_LONGEST_WAIT_S = 0.02  # the first call may include compilation


class SynchronizedClock(Clock):
    """Wall clock that synchronizes with the current GPU. The calls of one sample are launched back to back.

    It includes launch overhead, which ``CudaClock`` tries to exclude.
    """

    def now(self) -> float:
        torch.cuda.synchronize()
        return time.perf_counter()


class CudaClock(SynchronizedClock):
    """Clock of the work on the current GPU and stream. Each pass (one run of the mini-batch) lies between two events.

    Before a pass a buffer larger than the L2 cache is written to evict all operands. Within a pass the filter and small
    scratch buffers may stay in the cache, as in a run of the whole mini-batch.

    The device is kept waiting until all calls are launched, so that it never waits for a launch while it is timed. The
    launch time is known from the previous call; ``Timer`` makes a warm-up call first.

    Events have a resolution of about 0.5 us, and there may be a thousand candidates, so samples are short and few.

    An empty pass takes 1.4 us on an H200, which every pass includes.
    """

    step_rule = StoppingRule(time_limit_s=0.1, sample_s=0.001, max_calls=50)
    setup_rule = StoppingRule(noise=0.05, time_limit_s=0.01, sample_s=0.0005, max_calls=20)
    comparison_s = 0.2

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties()
        self._flushed = torch.empty(_L2_FACTOR * properties.L2_cache_size, dtype=torch.uint8, device="cuda")
        self._launch_s: WeakKeyDictionary[Callable[[], object], float] = WeakKeyDictionary()  # seconds for one call

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        passes = [min(calls_per_pass, calls - done) for done in range(0, calls, calls_per_pass)]
        wait_s = min(_LEAD * calls * self._launch_s.get(function, 0.0), _LONGEST_WAIT_S)
        torch.cuda._sleep(int(wait_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        began_s = time.perf_counter()
        events = [self._start_pass(function, size) for size in passes]
        launch_s = (time.perf_counter() - began_s) / calls
        self._launch_s[function] = min(launch_s, self._launch_s.get(function, launch_s))
        events[-1][1].synchronize()
        return float(sum(start.elapsed_time(end) for start, end in events)) / 1000

    def _start_pass(self, function: Callable[[], object], calls: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flushed.fill_(1)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        return start, end


def wall_clock(device: str) -> Clock:
    """Return the clock for the time that a user waits for calls on a device (``cpu`` or ``cuda``)."""
    return SynchronizedClock() if device == "cuda" else WallClock()
