"""Measures time: a ``Timer`` for each function to measure, samples of all of them in rounds, and the clocks used.

The method is nvbench's (stopping criteria that look at the noise, or at the noise that no longer shrinks, inside a hard
limit of time) with the robust statistics of ``torch.utils.benchmark``: median, and IQR / median for the spread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from math import inf
from random import Random
from statistics import median, quantiles
from typing import Protocol, TypeVar

from mucudnn.measuring.timing.candidate_errors import CANDIDATE_ERRORS, without_frames

T = TypeVar("T")


class Stop(StrEnum):
    """Reason why a timer takes no more samples."""

    QUIET = "the noise is small enough"
    STEADY = "the noise no longer shrinks"
    TIME = "out of time"
    DROPPED = "dropped from the race"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Rule for when a function was timed often enough.

    noise: IQR / median that is small enough, once there are ``min_samples``. patience: number of samples in a row
    without less noise that end the measurement. time_limit_s: most seconds of one timer, warm-up and samples together;
    one sample is always taken. sample_s: seconds that a sample should take; a sample repeats the function at most
    ``max_calls`` times. So reading the clock and short interruptions of the machine weigh little.
    """

    noise: float = 0.02
    min_samples: int = 3
    patience: int = 4
    time_limit_s: float = 1.0
    sample_s: float = 0.01
    max_calls: int = 1000


class Clock(ABC):
    """Clock that tells the time, and times calls. Work started before a call of ``now`` has ended when ``now`` returns.

    The more exact the clock, the shorter measuring takes. Each clock has its own rules: ``step_rule`` and
    ``setup_rule`` for a candidate, ``comparison_s`` for whole runs.
    """

    step_rule = StoppingRule()
    setup_rule = StoppingRule(noise=0.05, time_limit_s=0.05, sample_s=0.002)
    comparison_s = 1.5

    @abstractmethod
    def now(self) -> float:
        """Seconds since some fixed moment. Raises the error of a device if the device can no longer be used."""

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        """Seconds that ``calls`` calls of the function take, one right after the other. Raises the function's errors.

        calls_per_pass: number of calls in a row that have operands of their own, as in one run of the whole mini-batch.
        A clock that can empty the caches does so before each such pass.
        """
        start = self.now()
        for _ in range(calls):
            function()
        return self.now() - start


class WallClock(Clock):
    """Clock of the CPU, where a call has finished when it returns."""

    def now(self) -> float:
        return time.perf_counter()


# A rule that never stops: the caller says how many rounds there are, and each timer has a sample of each.
EVERY_ROUND = StoppingRule(noise=-1.0, patience=2**31, time_limit_s=inf)


def relative_spread(values: Sequence[float]) -> float:
    """IQR / median, the noise of a measurement; 0 for fewer than two values.

    >>> relative_spread([1.0, 2.0, 3.0, 4.0, 5.0])  # (4 - 2) / 3
    0.6666666666666666
    """
    if len(values) < 2:
        return 0.0
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle if middle > 0 else 0.0


class Runner(Protocol):
    """Place and settings in which to call a function, such as a thread or torch's switches."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Call the function, and return its result. Raises the function's errors."""


def here(function: Callable[[], T], /) -> T:
    """Call the function in this thread, under the present settings, and return its result."""
    return function()


def _nothing() -> None:
    """Do nothing, in place of a function that failed."""


@dataclass(slots=True, eq=False)
class Timer:
    """Timer of a function, in seconds per call: call ``sample`` until ``stop`` has the reason why no more are needed.

    calls_per_pass: as for ``Clock.time``. runner: where samples are taken, and the clock is read. warms_up: whether a
    call that does not count comes first; if not, the first sample is one call. An error of the function (no memory, or
    a RuntimeError) ends the measurement and is kept in ``error``.
    """

    function: Callable[[], object]
    clock: Clock = field(default_factory=WallClock)
    rule: StoppingRule = field(default_factory=StoppingRule)
    calls_per_pass: int = 1
    runner: Runner = here
    warms_up: bool = True
    samples_s: list[float] = field(default_factory=list)
    spent_s: float = 0.0
    stop: Stop | None = None
    error: Exception | None = None
    _fastest_s: float | None = None
    _smallest_noise: float = float("inf")
    _unimproved: int = 0

    @property
    def median_s(self) -> float:
        """Median of the samples, in seconds per call; at least one sample must have been taken."""
        return median(self.samples_s)

    @property
    def noise(self) -> float:
        return relative_spread(self.samples_s)

    def sample(self) -> None:
        """Add one sample, and set ``stop`` if no further one is needed.

        If the timer ``warms_up``, a call before the first sample is not counted: the call loads code, touches pages and
        shows how many calls make a sample.
        """
        self.runner(self._sample)

    def _sample(self) -> None:
        if self._fastest_s is None:
            self._fastest_s = self._time(1) if self.warms_up else inf
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


def sample_in_rounds(timers: Sequence[Timer]) -> Iterator[int]:
    """Sample all timers round by round until every timer has stopped. After each round, yield the number of rounds.

    Each round samples every timer, so that a slow minute of the machine hits all of them. The order is drawn anew for
    each round. In a fixed order a call always follows the same other call, whose state of caches and heap may suit it
    or not: of two equal calls one then seems up to a quarter slower, since it alone finds no memory that was touched
    before.
    """
    order = Random(0)  # the same in every run
    for done in count(1):
        unfinished = [timer for timer in timers if timer.stop is None]
        if not unfinished:
            return
        order.shuffle(unfinished)
        for timer in unfinished:
            timer.sample()
        yield done


def measure_in_turns(timers: Sequence[Timer], is_hopeless: Callable[[Timer], bool] | None = None) -> Iterator[Timer]:
    """Sample all timers round by round, and yield each when it stops.

    A timer that ``is_hopeless`` after a round is dropped: the timer keeps its samples and is yielded like the others.
    """
    yield from (timer for timer in timers if timer.stop is not None)
    racing = [timer for timer in timers if timer.stop is None]
    for _ in sample_in_rounds(racing):
        if is_hopeless is not None:
            for timer in racing:
                if timer.stop is None and is_hopeless(timer):
                    timer.stop = Stop.DROPPED
        yield from (timer for timer in racing if timer.stop is not None)
        racing = [timer for timer in racing if timer.stop is None]
