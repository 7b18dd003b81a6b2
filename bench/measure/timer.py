"""Measures time: one ``Timer`` for each candidate, and the clocks that timers read.

The method is nvbench's (stopping criteria that look at the noise, or at the noise that no longer shrinks, inside a hard
limit of time) with the robust statistics of ``torch.utils.benchmark``: median, and IQR / median for the spread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from statistics import median, quantiles
from typing import Protocol, TypeVar

from mucudnn.bench.measure.candidate_errors import CANDIDATE_ERRORS, without_frames

T = TypeVar("T")


class Stop(StrEnum):
    """Why a timer takes no more samples."""

    QUIET = "the noise is small enough"
    STEADY = "the noise no longer shrinks"
    TIME = "out of time"
    DROPPED = "dropped from the race"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """When enough is measured.

    noise: IQR / median that is small enough, once there are ``min_samples``.
    patience: so many samples in a row that did not make the noise smaller end the measurement.
    time_limit_s: most seconds of one timer, warm-up and samples together; one sample is always taken.
    sample_s: a sample repeats its function for about so many seconds, but at most ``max_calls`` times, so that reading
    the clock and short interruptions of the machine weigh little.
    """

    noise: float = 0.02
    min_samples: int = 3
    patience: int = 4
    time_limit_s: float = 1.0
    sample_s: float = 0.01
    max_calls: int = 1000


class Clock(ABC):
    """Tells the time, and times calls. Whatever was started before ``now`` is called has finished when it returns.

    How long measuring takes depends on how exact the clock is: ``step_rule`` and ``setup_rule`` of a candidate,
    ``comparison_s`` of whole runs.
    """

    step_rule = StoppingRule()
    setup_rule = StoppingRule(noise=0.05, time_limit_s=0.05, sample_s=0.002)
    comparison_s = 1.5

    @abstractmethod
    def now(self) -> float:
        """Seconds since some fixed moment. Raises what a device reports that can no longer be used."""

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        """Seconds that so many calls take, one right after the other. Raises what the function raises.

        calls_per_pass: so many calls in a row have operands of their own, and share others, as in one run of the whole
        mini-batch. A clock that can do so begins each pass with empty caches.
        """
        start = self.now()
        for _ in range(calls):
            function()
        return self.now() - start


class WallClock(Clock):
    """The clock of the CPU, where a call has finished when it returns."""

    def now(self) -> float:
        return time.perf_counter()


# Never ends by itself: for timers that are to have a sample of every round, as many as their caller takes.
EVERY_ROUND = StoppingRule(noise=-1.0, patience=2**31, time_limit_s=inf)


def relative_spread(values: Sequence[float]) -> float:
    """IQR / median, 0 for less than two values: the noise of a measurement."""
    if len(values) < 2:
        return 0.0
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle if middle > 0 else 0.0


class Runner(Protocol):
    """Where, and under which settings, a function is called."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Return what the function returns. Raises what it raises."""


def here(function: Callable[[], T], /) -> T:
    """Call the function in this thread, under the settings that there are."""
    return function()


def _nothing() -> None:
    """Stands in for a function that failed."""


@dataclass(slots=True, eq=False)
class Timer:
    """Seconds per call of a function: ``sample`` until ``stop`` says why it is enough.

    calls_per_pass: as for ``Clock.time``. runner: where samples are taken, and the clock is read. An error of the
    function (no memory, or a RuntimeError) ends the measurement and is kept in ``error``.
    """

    function: Callable[[], object]
    clock: Clock = field(default_factory=WallClock)
    rule: StoppingRule = field(default_factory=StoppingRule)
    calls_per_pass: int = 1
    runner: Runner = here
    samples_s: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    stop: Stop | None = None
    error: Exception | None = None
    _fastest_s: float | None = None
    _smallest_noise: float = float("inf")
    _unimproved: int = 0

    @property
    def median_s(self) -> float:
        """Needs at least one sample."""
        return median(self.samples_s)

    @property
    def noise(self) -> float:
        return relative_spread(self.samples_s)

    def sample(self) -> None:
        """Add one sample and decide whether to go on.

        The first is preceded by a call that is not counted: code is loaded, pages are touched, and the number of calls
        that make a sample is found.
        """
        self.runner(self._sample)

    def _sample(self) -> None:
        if self._fastest_s is None:
            self._fastest_s = self._time(1)
        if self.stop is not None:
            return
        seconds = self._time(self._calls(self._fastest_s))
        if self.error is None:
            self._fastest_s = min(self._fastest_s, seconds)
            self.samples_s.append(seconds)
            self.stop = self._decide()

    def _calls(self, call_s: float) -> int:
        if call_s * self.rule.max_calls <= self.rule.sample_s:
            return self.rule.max_calls
        return max(1, round(self.rule.sample_s / call_s))

    def _time(self, calls: int) -> float:
        try:
            elapsed_s = self.clock.time(self.function, calls, self.calls_per_pass)
        except CANDIDATE_ERRORS as error:
            self.error, self.stop = without_frames(error), Stop.FAILED
            self.function = _nothing  # lets go of what the function holds: the others may need that memory
            return inf
        self.spent_s += elapsed_s
        return elapsed_s / calls

    def _decide(self) -> Stop | None:
        noise = self.noise
        improved = noise < 0.95 * self._smallest_noise
        if len(self.samples_s) > 1:  # one sample has no noise
            self._unimproved = 0 if improved else self._unimproved + 1
            self._smallest_noise = min(self._smallest_noise, noise)
        if len(self.samples_s) >= self.rule.min_samples:
            if noise <= self.rule.noise:
                return Stop.QUIET
            if self._unimproved >= self.rule.patience:
                return Stop.STEADY
        return Stop.TIME if self.spent_s >= self.rule.time_limit_s else None
