"""Measures the load that other processes put on the machine meanwhile. What the system does not report is unknown."""

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

# Ticks of the kernel are 10 ms: over a shorter span, a few of them are as much as what is to be found.
_LEAST_SPAN_S = 0.5
_SHORTEST_SPAN_S = 0.2  # for a first problem, before which nothing was read: below it the load is unknown
_LONGEST_LOOK_BACK_S = 5.0  # what was before says nothing of now
_READ_EVERY_S = 0.02
_RATE_EVERY_S = 1.0
_LOOKS = 3
_RATE_RUNS = 20  # of the known kernel, to know its rate
_FEWEST_RATE_RUNS = 5
_RATE_MOST_S = 0.02
_REMEMBERED = 256
# A core's clock differs by a fifth between one busy core and all of them, and so does the best rate ever seen.
_SLOW_RATE = 0.7
_PATIENCE_S = 0.5  # between two looks at a machine that is busy


@dataclass(frozen=True, slots=True)
class Load:
    """Shares of the machine that this process did not have over a span of time. None: unknown.

    others_share: seconds per second that other processes took of the cores that this process needs; at most 1, a whole
    core. A thread that shares its core keeps all others waiting, so that it is not divided by the number of cores.
    throttled_share: share of the time in which a limit of the container, or a GPU that slowed itself down, stopped the
    work. rate_ratio: rate of a known kernel over its best rate ever seen on this machine: below 1 with slow clocks,
    where the other thread of a core has work, and where its threads do not run at the same time. stolen_share: share of
    the time of all usable cores that a hypervisor gave to other machines; it is part of ``others_share``. clock_hz:
    clock rate of the fastest core.
    """

    others_share: float | None = None
    throttled_share: float | None = None
    rate_ratio: float | None = None
    stolen_share: float | None = None
    clock_hz: float | None = None

    @property
    def share(self) -> float | None:
        """The largest share of the machine's speed that was missing for one reason, from 0 to 1; None if unknown."""
        slow = None if self.rate_ratio is None else 1 - self.rate_ratio if self.rate_ratio < _SLOW_RATE else 0.0
        return max((part for part in (self.others_share, self.throttled_share, slow) if part is not None), default=None)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is known to have disturbed the measurement: neither load, nor limits, nor slow clocks."""
        return self.share is None or self.share <= BUSY

    @property
    def is_free(self) -> bool:
        """Whether neither other processes nor a limit disturb. Slow clocks are allowed, since they stay for long."""
        return Load(self.others_share, self.throttled_share).is_quiet

    @property
    def is_known(self) -> bool:
        """Whether the system reported what other processes do; the rate of the known kernel alone does not tell."""
        return self.others_share is not None or self.throttled_share is not None

    def __str__(self) -> str:
        """The load as text to print: ``others take 45 % of a core, known work runs at 60 % of its best rate``."""
        parts = []
        if self.others_share is not None and self.others_share > BUSY:
            parts.append(f"others take {self.others_share:.0%} of a core")
        if self.throttled_share is not None and self.throttled_share > BUSY:
            parts.append(f"it is throttled {self.throttled_share:.0%} of the time")
        if self.rate_ratio is not None and self.rate_ratio < _SLOW_RATE:
            parts.append(f"known work runs at {self.rate_ratio:.0%} of its best rate")
        return ", ".join(parts) or ("unknown" if self.share is None else "quiet")


class Watch:
    """Watches the machine's load: call ``mark`` before a measurement, and ``since`` with that mark after it.

    use: reads what processors did so far, by ``clock``. rate: measures how often a known kernel runs per second now;
    None if there is no such kernel. cores: how many may be kept busy. processor_hz: reads the processor's clock rate;
    None if unknown. best_rate: the kernel's best rate, here or in earlier runs; 0 before the first one.
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
        """Begin a span of time, and return its start for ``since``; at most a few small files are read."""
        return self._look()

    def forget(self) -> None:
        """Forget all that was observed until now, so that the next load is of the time from now on."""
        self._seen.clear()
        self._seen.append(self._use())

    def since(self, mark: ProcessorUse) -> Load:
        """Return the machine's load from ``mark`` until now, or over a longer time if that would be too short."""
        now = self._look()
        if now.now_s - mark.now_s >= _LEAST_SPAN_S:
            return self._between(mark, now)
        recent = [seen for seen in self._seen if now.now_s - seen.now_s <= _LONGEST_LOOK_BACK_S]
        early = [seen for seen in recent if now.now_s - seen.now_s >= _LEAST_SPAN_S]
        return self._between(early[-1] if early else recent[0], now)

    def current(self) -> Load:
        """Return the load on the machine in the last half second."""
        return self.since(self._look())

    def wait(self, tell: Callable[[str], None], most_s: float) -> float:
        """Wait until the cores are free, for at most ``most_s`` seconds; return the seconds waited.

        tell: called with the reason for waiting.
        """
        waited_s = 0.0
        while waited_s < most_s and not (load := self.current()).is_free:
            tell(f"waiting for a quiet machine: {load}")
            self.pause()
            waited_s += _PATIENCE_S
        return waited_s

    def pause(self) -> None:
        """Sleep long enough to see afterwards what other processes do."""
        self._sleep(_PATIENCE_S)

    def shortage(self) -> str | None:
        """Return a warning if there are more threads than cores, and what to do about it; None if there are not."""
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
        idle_cores = max(0, last.cores - last.threads)  # others may have those
        return Load(
            _share(first.busy_s, last.busy_s, span_s, least=own_s / span_s + idle_cores),
            _share(first.throttled_s, last.throttled_s, span_s),
            rate_ratio,
            _share(first.stolen_s, last.stolen_s, span_s * max(1, last.cores)),
            clock_hz,
        )

    def _hz(self, now_s: float) -> float | None:
        """Return the processor's clock rate, read at most once a second, since each core may have a file of its own."""
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
        """Return the kernel's rate, after further runs if it is low, since it may be low for a moment only."""
        best = 0.0
        for _ in range(_LOOKS):
            best = max(best, rate())
            if best >= _SLOW_RATE * self.best_rate:
                break
        return best


def _share(first_s: float | None, last_s: float | None, span_s: float, least: float = 0.0) -> float | None:
    """Return a counter's increase as a share of a span, above ``least``, from 0 to 1; None if it is not counted."""
    return None if first_s is None or last_s is None else min(1.0, max(0.0, (last_s - first_s) / span_s - least))


def too_many_threads(threads: int, cores: float) -> str | None:
    """Say that torch uses more threads than the process has cores, with the remedy; None: it does not.

    >>> print(too_many_threads(8, 1.5))
    torch uses 8 threads, and this process may use 1.5 cores, so that threads wait for each other: call \
torch.set_num_threads(2) first, or set OMP_NUM_THREADS=2
    """
    most = max(1, -(-int(cores * 100) // 100))  # half a core needs a thread, too
    if threads <= most:
        return None
    return (
        f"torch uses {threads} threads, and this process may use {cores:g} core{'' if cores == 1 else 's'}, so that "
        f"threads wait for each other: call torch.set_num_threads({most}) first, or set OMP_NUM_THREADS={most}"
    )


def watch_of(device: str) -> Watch:
    """Return an observer of the processors' load, or the current GPU's clocks; of nothing with ``MUCUDNN_WATCH=0``."""
    if os.environ.get("MUCUDNN_WATCH") == "0":
        return Watch()
    if device == "cpu":
        return _watch_of_processors(os.getpid())
    import torch  # where there is CUDA

    return Watch(_GpuUse(f"GPU-{torch.cuda.get_device_properties().uuid}"))


@cache
def _watch_of_processors(process: int) -> Watch:
    """Return the ``Watch`` that all of this process shares: what it has seen serves the next tuning."""
    processors = Processors()
    return Watch(processors.use, known_rate, processors.allowed_cores, processors.clock_hz)


def known_rate() -> float:
    """Return how many times a second a fixed matrix product could run now: the best of twenty runs, some 3 ms.

    If threads wait for a core, fewer runs are made, since each takes long then, and measuring the rate must stay quick.

    The best run counts, so that the rate depends on the clocks, on work of others on the same core, and on processes
    that take turns with this one without a pause. The product is in float64, which no setting of torch makes coarser.
    """
    import torch  # here: commands that measure nothing load it for nothing

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
    """Seconds in which a GPU was slowed down by itself, each time its state was read. Not run on a GPU yet."""

    def __init__(self, uuid: str) -> None:
        self._reasons = partial(current_reasons, uuid)
        self._last_s, self._throttled_s = time.perf_counter(), 0.0

    def __call__(self) -> ProcessorUse:
        now_s = time.perf_counter()
        if slows_down(self._reasons()):
            self._throttled_s += now_s - self._last_s
        self._last_s = now_s
        return ProcessorUse(now_s=now_s, throttled_s=self._throttled_s)
