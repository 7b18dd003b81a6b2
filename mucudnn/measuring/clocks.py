"""Clocks: of the CPU with warm and with cold caches, and of CUDA devices; and the machine's rates.

Between two calls of a convolution, a training step reads and writes hundreds of megabytes. In a tight loop the same
call finds its operands and result in the caches, and seems up to 1.5 times faster than in a step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mucudnn.core.values import parse_bytes

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_LEAST_BYTES, _MOST_BYTES = 16 * 2**20, 64 * 2**20  # a process may never get all of a large shared cache
_OF_LAST_LEVEL = 1.5

_L2_FACTOR = 2  # the flush writes this many times the cache size
_CYCLES_PER_S = 2e9  # an upper bound for all devices
_LEAD = 2.0  # the device waits this many times the previous launch time
_LONGEST_WAIT_S = 0.02  # the first call may include compilation

_SIDE = 768
_COPIED_BYTES = 64 * 2**20  # larger than any cache
_FEWEST_RUNS = 5
_QUICK_LOOKS = 10
_QUICK_S, _THOROUGH_S = 0.02, 0.5  # clock rates vary: a longer probe is likelier to see the peak

_seen_flops_per_s: defaultdict[tuple[str, int], list[float]] = defaultdict(list)  # by dtype and number of threads


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Rule of a function's samples: how long each is, and when there are enough, unless the caller decides that.

    time_limit_s: seconds for warm-up and samples together; one sample is always taken.
    sample_s: duration to aim at for a sample, which repeats the function up to ``max_calls`` times so that clock
    overhead and short interruptions matter little.
    """

    time_limit_s: float = inf
    sample_s: float = 0.01
    max_calls: int = 1000


class Clock(ABC):
    """Clock that times calls. ``now`` waits until all work started before it has finished.

    More precise clocks need shorter samples, so each has its own rule: ``every_round``, of a timer that gets one sample
    in each round until its caller stops.
    """

    every_round = StoppingRule()

    @abstractmethod
    def now(self) -> float:
        """Return the seconds since a fixed moment. Raises the device's error if the device can no longer be used."""

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        """Return the seconds that ``calls`` back-to-back calls of the function take. Raises the function's errors.

        calls_per_pass: number of calls that make up one pass over the mini-batch, each with its own slice. A clock that
        can flush the caches does so before each pass.
        """
        start = self.now()
        for _ in range(calls):
            function()
        return self.now() - start

    def rest(self) -> None:  # noqa: B027
        """Free the memory that the clock keeps for the next sample, if it keeps any."""


class WallClock(Clock):
    """Clock of the CPU, where a call has finished when it returns."""

    def now(self) -> float:
        return time.perf_counter()


class ColdClock(WallClock):
    """Wall clock that flushes the caches before each pass (see ``Clock.time``), outside the measured time.

    Samples are short and of few calls, since flushing takes most of the time.
    """

    every_round = StoppingRule(sample_s=0.002, max_calls=8)

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        elapsed_s, left = 0.0, calls
        while left > 0:
            in_this_pass = min(left, calls_per_pass)
            self.empty_caches()
            start = time.perf_counter()
            for _ in range(in_this_pass):
                function()
            elapsed_s += time.perf_counter() - start
            left -= in_this_pass
        return elapsed_s

    def empty_caches(self) -> None:
        """Evict all cached data by writing 1.5 times the size of the last-level cache, which takes milliseconds."""
        self._written.add_(1)

    def rest(self) -> None:
        self.__dict__.pop("_written", None)

    @cached_property
    def _written(self) -> Tensor:
        size_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, int(_OF_LAST_LEVEL * last_level_bytes())))
        with torch.inference_mode(False):
            return torch.zeros(size_bytes // 4, dtype=torch.int32)


def last_level_bytes(caches: Path = _CACHES) -> int:
    """Return the size in bytes of a core's largest cache, as Linux reports it; 0 on other systems."""
    sizes = [path.read_text(encoding="ascii").strip() for path in caches.glob("index*/size")]
    return max((parse_bytes(f"{size}iB") or 0 for size in sizes if size[:1].isdigit()), default=0)


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

    every_round = StoppingRule(sample_s=0.001, max_calls=50)

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


def peak_flops_per_s(device: str, dtype: str) -> float:
    """Return the best rate of torch's square matrix product, in FLOP/s (additions and multiplications).

    The product is timed briefly in the first ``_QUICK_LOOKS`` calls per process, and the best rate counts, since load
    can halve the rate. The rate is infinite where a matrix product is no upper bound: on a GPU, which has several kinds
    of multipliers, and for half precision, whose multipliers not all products can use.
    """
    if not _is_bound(device, dtype):
        return inf
    seen = _seen_flops_per_s[dtype, torch.get_num_threads()]
    if len(seen) < _QUICK_LOOKS:
        seen.append(_flops_per_s(dtype, _QUICK_S))
    return max(seen)


def sustained_flops_per_s(device: str, dtype: str) -> float:
    """Measure matrix products for half a second and return the best rate in FLOP/s; inf where it is no upper bound."""
    return _flops_per_s(dtype, _THOROUGH_S) if _is_bound(device, dtype) else inf


def copied_bytes_per_s(device: str) -> float:
    """Measure copies for half a second and return the best rate in bytes/s, counting both reads and writes.

    The rate is infinite on devices where copies are not measured.
    """
    if device != "cpu":
        return inf
    with torch.inference_mode():
        source = torch.ones(_COPIED_BYTES // 4)
        target = torch.zeros_like(source)
        return 2 * _COPIED_BYTES / _best_s(lambda: target.copy_(source), _THOROUGH_S)


def _is_bound(device: str, dtype: str) -> bool:
    return device == "cpu" and dtype in ("float32", "float64")


def _flops_per_s(dtype: str, least_s: float) -> float:
    with torch.inference_mode():
        random = torch.Generator().manual_seed(0)  # arithmetic on constant data draws less power and may run faster
        matrix = torch.empty(_SIDE, _SIDE, dtype=getattr(torch, dtype)).normal_(generator=random)
        product = torch.empty_like(matrix)
        return 2 * _SIDE**3 / _best_s(lambda: torch.mm(matrix, matrix, out=product), least_s)


def _best_s(call: Callable[[], object], least_s: float) -> float:
    """Repeat a call for at least ``least_s`` seconds in total, and return the seconds of the fastest call."""
    clock, times_s = WallClock(), list[float]()
    while len(times_s) < _FEWEST_RUNS or sum(times_s) < least_s:
        times_s.append(clock.time(call, 1))
    return min(times_s)
