"""Calls timed in turns: timers, rounds in which every call gets a turn, and comparisons with a baseline.

Comparisons end when their verdict is clear, or at a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from random import Random
from typing import Protocol, TypeVar

from mucudnn.core.errors import CANDIDATE_ERRORS, without_frames
from mucudnn.core.records import Comparison
from mucudnn.measuring.clocks import Clock, StoppingRule, WallClock
from mucudnn.measuring.load import Watch

T = TypeVar("T")


def in_turns(calls: Sequence[Callable[[], T]]) -> Iterator[list[T]]:
    """Run rounds without end, in each of which every call gets a turn; after each, yield the results of the calls.

    A slow phase of the machine affects all calls of a round. The order is shuffled for each round, but is the same in
    every run and on all ranks. In a fixed order a call always follows the same other call and inherits its caches and
    heap, which can make one of two equal calls seem up to 25 % slower.
    """
    random, order = Random(0), list(range(len(calls)))
    while True:
        random.shuffle(order)
        results = {index: calls[index]() for index in order}
        yield [results[index] for index in range(len(calls))]


@dataclass(frozen=True, slots=True)
class Rounds:
    """Rule that says when there are enough rounds: minimum, maximum, and time after which no further round begins.

    sure: rounds after which a clear result ends the turns. The others are for comparisons.
    warm_up_s: a first round shorter than this is not counted, since it loads code and touches fresh memory.
    race: whether only the fastest call matters. Then a call that was clearly slower than another in ``_LAPPED`` rounds
    is dropped, and the comparison ends with a verdict on the fastest call: the larger its lead, the fewer rounds.
    """

    least: int
    most: int
    time_limit_s: float = inf
    sure: int = 5
    warm_up_s: float = inf
    race: bool = False

    def is_enough(self, done: int, spent_s: float, *, is_clear: bool = False) -> bool:
        """Return whether no further round is needed after ``done`` rounds, which took ``spent_s`` in all."""
        is_over = spent_s >= self.time_limit_s or (is_clear and done >= self.sure)
        return done >= self.most or (done >= self.least and is_over)


class Stop(StrEnum):
    """Reason why a timer takes no more samples."""

    TIME = "out of time"
    DROPPED = "dropped from the race"
    FAILED = "failed"


class Runner(Protocol):
    """Context in which to call a function, such as a thread or certain torch settings."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """Call the function, and return its result. Raises the function's errors."""


def here(function: Callable[[], T], /) -> T:
    """Call the function in this thread with the current settings, and return its result."""
    return function()


@dataclass(slots=True, eq=False)
class Timer:
    """Timer of a function, in seconds per call: call ``sample`` until ``stop`` is set to the reason for stopping.

    An error of the function (out of memory, or a RuntimeError) ends the measurement and is kept in ``error``.

    calls_per_pass: see ``Clock.time``.
    runner: context in which samples are taken and the clock is read.
    warms_up: whether a warm-up call comes first; if not, the first sample is a single call.
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

    def sample(self) -> None:
        """Add one sample, and set ``stop`` if no further one is needed. Do nothing if it is set.

        If the timer ``warms_up``, an uncounted call comes first. It loads code, touches pages and shows how many calls
        make up a sample.
        """
        if self.stop is None:
            self.runner(self._sample)

    def _sample(self) -> None:
        if self._fastest_s is None:
            self._fastest_s = self._time(1) if self.warms_up else inf
        if self.stop is not None:
            return
        rule = self.rule
        is_short = self._fastest_s * rule.max_calls <= rule.sample_s
        seconds = self._time(rule.max_calls if is_short else max(1, round(rule.sample_s / self._fastest_s)))
        if self.stop is not None:
            return
        self._fastest_s = min(self._fastest_s, seconds)
        self.samples_s.append(seconds)
        if self.spent_s >= rule.time_limit_s:
            self.stop = Stop.TIME

    def _time(self, calls: int) -> float:
        """Return the seconds of one of so many calls; inf, and set ``stop``, if they fail."""
        try:
            elapsed_s = self.clock.time(self.function, calls, self.calls_per_pass)
        except CANDIDATE_ERRORS as error:
            self.error, self.stop = without_frames(error), Stop.FAILED
            self.function = lambda: None  # frees the function's memory for the other timers
            return inf
        self.spent_s += elapsed_s
        return elapsed_s / calls


RACE = Rounds(3, 9, 0.3, warm_up_s=0.1, race=True)  # of whole runs
_LAPPED, _LAP = 2, 1.04  # a call is dropped after 2 rounds in which it took over 1.04 times as long as another
_FAR_AHEAD, _AHEAD = 1.25, 1.1  # speedups that decide after two long rounds, and after three rounds
_EVEN = 0.03  # smaller differences count as equal in a race


def compare_in_turns(
    baseline: Callable[[], object],
    runs: Sequence[Callable[[], object]],
    clock: Clock,
    rounds: Rounds = RACE,
    watch: Watch | None = None,
) -> list[Comparison | Exception]:
    """Time ``runs`` and the baseline round by round, until every verdict is clear or time is up.

    A call that fails has its error in place of a result.

    watch: observer of the machine's load meanwhile, which the results then include.

    Raises any error of the baseline.
    """
    mark = None if watch is None else watch.mark()
    base, *timers = (Timer(run, clock, clock.every_round, warms_up=False) for run in (baseline, *runs))
    for number, _ in enumerate(in_turns([timer.sample for timer in (base, *timers)])):
        if base.error is not None:
            raise base.error
        spent_s = base.spent_s + sum(timer.spent_s for timer in timers)
        if number == 0 and spent_s < rounds.warm_up_s:
            for timer in (base, *timers):
                timer.samples_s.clear()
            continue
        # In a race, who is far behind drops out, and a verdict on the fastest ends it.
        if rounds.race:
            racing = [timer for timer in timers if timer.stop is None]
            for timer in [timer for timer in racing if any(_is_lapped(timer, rival) for rival in racing)]:
                timer.stop = Stop.DROPPED
        done, results = len(base.samples_s), [_compared(base, timer) for timer in timers if timer.stop is None]
        if rounds.race:
            results = sorted(results, key=lambda result: result.speedup)[-1:]
            is_long = spent_s >= rounds.time_limit_s / 3
            if all(_is_obvious(result, done, is_long=is_long) for result in results):
                break
        # The rounds end when each verdict is clear, or at the limit. What is even in a race, need not be settled.
        even = _EVEN if rounds.race else 0.0
        leads = [abs(result.speedup - 1) for result in results]
        is_clear = all(lead > result.noise or lead <= even for lead, result in zip(leads, results, strict=True))
        if rounds.is_enough(done, spent_s, is_clear=is_clear):
            break
    load = None if watch is None or mark is None else watch.since(mark).share
    return [timer.error or replace(_compared(base, timer), load=load) for timer in timers]


def _compared(baseline: Timer, timer: Timer) -> Comparison:
    """Compare a call's timer with the baseline's, over the rounds in which both ran."""
    return Comparison.of(baseline.samples_s[: len(timer.samples_s)], timer.samples_s)


def _is_lapped(timer: Timer, rival: Timer) -> bool:
    pairs = list(zip(timer.samples_s, rival.samples_s, strict=True))
    return len(pairs) >= _LAPPED and all(time_s > _LAP * rival_s for time_s, rival_s in pairs)


def _is_obvious(result: Comparison, done: int, *, is_long: bool) -> bool:
    """Whether the call was much faster than the baseline in each of the ``done`` rounds, or slower in each of three."""
    lowest, highest = min(result.speedups), max(result.speedups)
    if done >= 2 and is_long and (lowest > _FAR_AHEAD or highest < 1 / _FAR_AHEAD):
        return True
    return done >= 3 and (lowest > _AHEAD or highest < 1)
