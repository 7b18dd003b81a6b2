"""The load that other processes put on the machine during a measurement, as far as the system reports it."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from mucudnn.measuring.timing.processor_use import Processors, ProcessorUse
from mucudnn.measuring.timing.throttling import current_reasons, slows_down
from mucudnn.words.results import BUSY

# The kernel counts in ticks of 10 ms: over a shorter span, rounding is as large as the load to be detected.
_LEAST_SPAN_S = 0.5
_SHORTEST_SPAN_S = 0.2  # for the first measurement, without earlier readings; the load over a shorter span is unknown
_LONGEST_LOOK_BACK_S = 5.0  # older readings do not describe the current load
_READ_EVERY_S = 0.02
_RATE_EVERY_S = 1.0
_LOOKS = 3
_RATE_RUNS = 20  # of the reference kernel
_FEWEST_RATE_RUNS = 5
_RATE_MOST_S = 0.02
_REMEMBERED = 256
# A core's clock is up to 20 % slower when all cores are busy, which lowers the rate without any other load.
_SLOW_RATE = 0.7
_PATIENCE_S = 0.5  # between two readings on a busy machine


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of the machine that were unavailable to this process over a span of time. Unknown values are None.

    others_share: core seconds per second that other processes took from the cores that this process needs, at most 1.
    It is not divided by the number of cores, since one slowed thread keeps all others waiting. throttled_share: share
    of the time in which a container limit, or a GPU that throttled itself, stopped the work. rate_ratio: rate of a
    reference kernel divided by its best rate ever seen on this machine; below 1 with slow clocks, a busy sibling
    hyper-thread, or threads that do not run at the same time. stolen_share: share of the time of all usable cores that
    a hypervisor gave to other machines; part of ``others_share``. clock_hz: clock rate of the fastest core.
    """

    others_share: float | None = None
    throttled_share: float | None = None
    rate_ratio: float | None = None
    stolen_share: float | None = None
    clock_hz: float | None = None

    @property
    def share(self) -> float | None:
        """The largest share of the machine's speed lost for a single reason, from 0 to 1; None if unknown."""
        slow = None if self.rate_ratio is None else 1 - self.rate_ratio if self.rate_ratio < _SLOW_RATE else 0.0
        return max((part for part in (self.others_share, self.throttled_share, slow) if part is not None), default=None)

    @property
    def is_quiet(self) -> bool:
        """Whether no disturbance is known: no load, no throttling, no slow clocks."""
        return self.share is None or self.share <= BUSY

    @property
    def is_free(self) -> bool:
        """Whether there is neither load nor throttling. Slow clocks are allowed, since waiting seldom helps."""
        return Load(self.others_share, self.throttled_share).is_quiet

    @property
    def is_known(self) -> bool:
        """Whether the system reports load or throttling; the rate of the reference kernel alone does not count."""
        return self.others_share is not None or self.throttled_share is not None

    def __str__(self) -> str:
        """Return text such as ``others take 45 % of a core, known work runs at 60 % of its best rate``."""
        parts = []
        if self.others_share is not None and self.others_share > BUSY:
            parts.append(f"others take {self.others_share:.0%} of a core")
        if self.throttled_share is not None and self.throttled_share > BUSY:
            parts.append(f"it is throttled {self.throttled_share:.0%} of the time")
        if self.rate_ratio is not None and self.rate_ratio < _SLOW_RATE:
            parts.append(f"known work runs at {self.rate_ratio:.0%} of its best rate")
        return ", ".join(parts) or ("unknown" if self.share is None else "quiet")


class Watch:
    """Observer of the machine's load: call ``mark`` before a measurement, and ``since`` with that mark after it.

    use: reads the counters of processor time. rate: measures the rate of a reference kernel in calls per second; None
    if there is no such kernel. cores: returns how many cores may be kept busy. processor_hz: reads the processor's
    clock rate, None if unknown. best_rate: the kernel's best rate in this or earlier runs; 0 before the first run.
    """

    def __init__(
        self,
        use: Callable[[], ProcessorUse] = ProcessorUse,
        rate: Callable[[], float] | None = None,
        cores: Callable[[], float] | None = None,
        processor_hz: Callable[[], float | None] = lambda: None,
        *,
        best_rate: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.best_rate = best_rate
        self._use, self._rate, self._cores, self._clock, self._sleep = use, rate, cores, clock, sleep
        self._processor_hz = processor_hz
        self._seen = deque([use()], _REMEMBERED)
        self._last_rate: float | None = None
        self._rate_seen_s = -_RATE_EVERY_S
        self._last_hz: float | None = None
        self._hz_seen_s = -_RATE_EVERY_S

    def mark(self) -> ProcessorUse:
        """Begin a span of time, and return its start for ``since``. This reads a few small files at most."""
        return self._look()

    def forget(self) -> None:
        """Discard all readings so far, so that the next load covers only the time from now on."""
        self._seen.clear()
        self._seen.append(self._use())

    def since(self, mark: ProcessorUse) -> Load:
        """Return the machine's load since ``mark``, or over a longer span if that one is too short to measure."""
        now = self._look()
        if now.now_s - mark.now_s >= _LEAST_SPAN_S:
            return self._between(mark, now)
        recent = [seen for seen in self._seen if now.now_s - seen.now_s <= _LONGEST_LOOK_BACK_S]
        early = [seen for seen in recent if now.now_s - seen.now_s >= _LEAST_SPAN_S]
        return self._between(early[-1] if early else recent[0], now)

    def current(self) -> Load:
        """Return the machine's load over the last half second."""
        return self.since(self._look())

    def wait(self, tell: Callable[[str], None], most_s: float) -> float:
        """Wait until the cores are free, at most ``most_s`` seconds; return the seconds waited.

        tell: called with the reason for waiting.
        """
        waited_s = 0.0
        while waited_s < most_s and not (load := self.current()).is_free:
            tell(f"waiting for a quiet machine: {load}")
            self.pause()
            waited_s += _PATIENCE_S
        return waited_s

    def pause(self) -> None:
        """Sleep long enough for a new reading of the load."""
        self._sleep(_PATIENCE_S)

    def shortage(self) -> str | None:
        """Return a warning, with the remedy, if there are more threads than cores; None otherwise."""
        return None if self._cores is None else too_many_threads(self._look().threads, self._cores())

    def _look(self) -> ProcessorUse:
        if self._clock() - self._seen[-1].now_s >= _READ_EVERY_S:
            self._seen.append(self._use())
        return self._seen[-1]

    def _between(self, first: ProcessorUse, last: ProcessorUse) -> Load:
        span_s, own_s = last.now_s - first.now_s, last.own_s - first.own_s
        rate_ratio, clock_hz = self._rate_ratio(last.now_s), self._hz(last.now_s)
        if span_s < _SHORTEST_SPAN_S:
            return Load(rate_ratio=rate_ratio, clock_hz=clock_hz)
        idle_cores = max(0, last.cores - last.threads)  # which other processes may use freely
        return Load(
            _share(first.busy_s, last.busy_s, span_s, least=own_s / span_s + idle_cores),
            _share(first.throttled_s, last.throttled_s, span_s),
            rate_ratio,
            _share(first.stolen_s, last.stolen_s, span_s * max(1, last.cores)),
            clock_hz,
        )

    def _hz(self, now_s: float) -> float | None:
        """Return the processor's clock rate, read at most once a second, since reading may open one file per core."""
        if now_s - self._hz_seen_s >= _RATE_EVERY_S:
            self._last_hz, self._hz_seen_s = self._processor_hz(), now_s
        return self._last_hz

    def _rate_ratio(self, now_s: float) -> float | None:
        if self._rate is None:
            return None
        if self._last_rate is None or now_s - self._rate_seen_s >= _RATE_EVERY_S:
            self._last_rate, self._rate_seen_s = self._steady_rate(self._rate), now_s
            self.best_rate = max(self.best_rate, self._last_rate)
        return self._last_rate / self.best_rate

    def _steady_rate(self, rate: Callable[[], float]) -> float:
        """Return the kernel's rate; retry if it is low, since the cause may be brief."""
        best = 0.0
        for _ in range(_LOOKS):
            best = max(best, rate())
            if best >= _SLOW_RATE * self.best_rate:
                break
        return best


def _share(first_s: float | None, last_s: float | None, span_s: float, least: float = 0.0) -> float | None:
    """Return a counter's increase as a share of a span, less ``least``, within 0 to 1; None if it is not counted."""
    return None if first_s is None or last_s is None else min(1.0, max(0.0, (last_s - first_s) / span_s - least))


def too_many_threads(threads: int, cores: float) -> str | None:
    """Return a warning, with the remedy, if torch uses more threads than the process has cores; None otherwise.

    >>> print(too_many_threads(8, 1.5))
    torch uses 8 threads, and this process may use 1.5 cores, so that threads wait for each other: call \
torch.set_num_threads(2) first, or set OMP_NUM_THREADS=2
    """
    most = max(1, -(-int(cores * 100) // 100))  # a fraction of a core needs a whole thread
    if threads <= most:
        return None
    return (
        f"torch uses {threads} threads, and this process may use {cores:g} core{'' if cores == 1 else 's'}, so that "
        f"threads wait for each other: call torch.set_num_threads({most}) first, or set OMP_NUM_THREADS={most}"
    )


def watch_of(device: str) -> Watch:
    """Return the observer of a device's load; with ``MUCUDNN_WATCH=0``, one that observes nothing."""
    if os.environ.get("MUCUDNN_WATCH") == "0":
        return Watch()
    if device == "cpu":
        return _watch_of_processors(os.getpid())
    import torch  # where there is CUDA

    return Watch(_GpuUse(f"GPU-{torch.cuda.get_device_properties().uuid}"))


@cache
def _watch_of_processors(process: int) -> Watch:
    """Return the ``Watch`` that this process shares, so that later tunings reuse its readings."""
    processors = Processors()
    return Watch(processors.use, known_rate, processors.allowed_cores, processors.clock_hz)


def known_rate() -> float:
    """Return the current rate of a fixed matrix product, in runs per second: the best of 20 runs, about 3 ms in all.

    If threads wait for a core, fewer runs are made to stay quick. Since the best run counts, the rate shows slow
    clocks, work on sibling hyper-threads, and constant competition for the cores, but not short interruptions. The
    product is in float64, whose precision no setting of torch reduces.
    """
    import torch  # lazy: most commands do not need it

    a = torch.ones(192, 192, dtype=torch.float64, device="cpu")
    out, fastest_s = torch.empty_like(a), float("inf")
    with torch.no_grad():
        begun_s = time.perf_counter()
        for run in range(_RATE_RUNS):
            start_s = time.perf_counter()
            if run >= _FEWEST_RATE_RUNS and start_s - begun_s > _RATE_MOST_S:
                break
            torch.mm(a, a, out=out)
            fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return 1 / fastest_s


class _GpuUse:
    """Counter of the seconds for which a GPU has throttled itself, updated at each call."""

    def __init__(self, uuid: str) -> None:
        self._reasons = partial(current_reasons, uuid)
        self._last_s, self._throttled_s = time.perf_counter(), 0.0

    def __call__(self) -> ProcessorUse:
        now_s = time.perf_counter()
        if slows_down(self._reasons()):
            self._throttled_s += now_s - self._last_s
        self._last_s = now_s
        return ProcessorUse(now_s=now_s, throttled_s=self._throttled_s)
