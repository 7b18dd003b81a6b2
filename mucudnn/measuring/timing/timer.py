"""Timers of functions, interleaved sampling of several timers, and clocks.

The method is nvbench's (stop when the noise is small or no longer shrinks, or at a hard time limit) with the robust
statistics of ``torch.utils.benchmark``: median, and IQR / median for the spread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from math import inf
from random import Random
from statistics import quantiles
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
    """Rule that decides when a function has enough samples.

    noise: IQR / median at which sampling stops, once there are ``min_samples``. patience: number of consecutive samples
    without an improvement of the noise after which sampling stops. time_limit_s: seconds for warm-up and samples
    together; one sample is always taken. sample_s: duration to aim at for a sample, which repeats the function up to
    ``max_calls`` times so that clock overhead and short interruptions matter little.
    """

    noise: float = 0.02
    min_samples: int = 3
    patience: int = 4
    time_limit_s: float = 1.0
    sample_s: float = 0.01
    max_calls: int = 1000


class Clock(ABC):
    """Clock that times calls. ``now`` waits until all work started before it has finished.

    More precise clocks need less measuring, so each has its own rules: ``step_rule`` and ``setup_rule`` for a
    candidate, ``comparison_s`` for whole runs.
    """

    step_rule = StoppingRule()
    setup_rule = StoppingRule(noise=0.05, time_limit_s=0.05, sample_s=0.002)
    comparison_s = 1.5

    @abstractmethod
    def now(self) -> float:
        """Return the seconds since a fixed moment. Raises the device's error if the device can no longer be used."""

    @property
    def every_round(self) -> StoppingRule:
        """Rule of a timer that gets one sample in each round, as long as ``step_rule``'s, until its caller stops."""
        return replace(EVERY_ROUND, sample_s=self.step_rule.sample_s, max_calls=self.step_rule.max_calls)

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        """Return the seconds that ``calls`` back-to-back calls of the function take. Raises the function's errors.

        calls_per_pass: number of calls that make up one pass over the mini-batch, each with its own slice. A clock that
        can flush the caches does so before each pass.
        """
        start = self.now()
        for _ in range(calls):
            function()
        return self.now() - start


class WallClock(Clock):
    """Clock of the CPU, where a call has finished when it returns."""

    def now(self) -> float:
        return time.perf_counter()


# A rule that never stops: the caller decides on the number of rounds, and each timer gets one sample per round.
EVERY_ROUND = StoppingRule(noise=-1.0, patience=2**31, time_limit_s=inf)


def relative_spread(values: Sequence[float]) -> float:
    """Return IQR / median, the noise of a measurement; 0 for fewer than two values.

    >>> relative_spread([1.0, 2.0, 3.0, 4.0, 5.0])  # (4 - 2) / 3
    0.6666666666666666
    """
    if len(values) < 2:
        return 0.0
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle if middle > 0 else 0.0


class Runner(Protocol):
    """Context in which to call a function, such as a thread or certain torch settings."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Call the function, and return its result. Raises the function's errors."""


def here(function: Callable[[], T], /) -> T:
    """Call the function in this thread with the current settings, and return its result."""
    return function()


def _nothing() -> None:
    """Do nothing, in place of a function that failed."""


@dataclass(slots=True, eq=False)
class Timer:
    """Timer of a function, in seconds per call: call ``sample`` until ``stop`` is set to the reason for stopping.

    calls_per_pass: see ``Clock.time``. runner: context in which samples are taken and the clock is read. warms_up:
    whether a warm-up call comes first; if not, the first sample is a single call. An error of the function (out of
    memory, or a RuntimeError) ends the measurement and is kept in ``error``.
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
    def noise(self) -> float:
        return relative_spread(self.samples_s)

    def sample(self) -> None:
        """Add one sample, and set ``stop`` if no further one is needed.

        If the timer ``warms_up``, an uncounted call comes first. It loads code, touches pages and shows how many calls
        make up a sample.
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
            self.function = _nothing  # frees the function's memory for the other timers
            return inf
        self.spent_s += elapsed_s
        return elapsed_s / calls

    def _decide(self) -> Stop | None:
        noise = self.noise
        improved = noise < 0.95 * self._smallest_noise
        if len(self.samples_s) > 1:  # the noise of one sample is undefined
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

    Each round samples every timer, so that a slow phase of the machine affects all of them. The order is shuffled for
    each round. In a fixed order a call always follows the same other call and inherits its caches and heap, which can
    make one of two equal calls seem up to 25 % slower.
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
    """Sample all timers round by round, and yield each timer when it stops.

    A timer for which ``is_hopeless`` returns true after a round is dropped; it keeps its samples and is yielded too.
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
