"""Interleaved comparisons of calls with a baseline, repeated until it is clear which is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from mucudnn.core.results import WholeRun
from mucudnn.measuring.timing.timer import Clock, Stop, Timer, sample_in_rounds


@dataclass(frozen=True, slots=True)
class Rounds:
    """Limits on the rounds of a comparison: minimum, maximum, and the time after which no further round begins.

    time_limit_s: in seconds; None for the clock's ``comparison_s``. sure: rounds after which clear verdicts end the
    comparison. warm_up_s: a first round shorter than this is not counted, since it loads code and touches fresh memory.
    race: whether only the fastest call matters. Then a call that was clearly slower than another in ``_LAPPED`` rounds
    is dropped, and the comparison ends with a verdict on the fastest call: the larger its lead, the fewer rounds.
    """

    least: int = 5
    most: int = 25
    time_limit_s: float | None = None
    sure: int = 5
    warm_up_s: float = inf
    race: bool = False

    def is_enough(self, done: int, results: Sequence[WholeRun], spent_s: float, limit_s: float) -> bool:
        """Return whether no further round is needed after ``done`` rounds, which took ``spent_s`` in all."""
        if done >= self.most:
            return True
        if self.race:
            results = sorted(results, key=lambda result: result.speedup)[-1:]
            if all(_is_obvious(result, done, spent_s >= limit_s / 3) for result in results):
                return True
        is_sure = done >= self.sure and all(self._is_settled(result) for result in results)
        return done >= self.least and (spent_s >= limit_s or is_sure)

    def _is_settled(self, result: WholeRun) -> bool:
        """Whether the call is faster or slower than the baseline by more than the noise, or even with it in a race."""
        return abs(result.speedup - 1) > result.noise or (self.race and abs(result.speedup - 1) <= _EVEN)


THOROUGH, QUICK = Rounds(), Rounds(3, 9, 0.3, warm_up_s=0.1, race=True)
_LAPPED, _LAP = 2, 1.04  # a call is dropped after 2 rounds in which it took over 1.04 times as long as another
_FAR_AHEAD, _AHEAD = 1.25, 1.1  # speedups that decide after two long rounds, and after three rounds
_EVEN = 0.03  # smaller differences count as equal in a race


def compare_in_turns(
    baseline: Callable[[], object],
    runs: Sequence[Callable[[], object]],
    clock: Clock,
    rounds: Rounds = THOROUGH,
) -> list[WholeRun | Exception]:
    """Time ``runs`` and the baseline round by round, until every verdict is clear or time is up.

    A call that fails has its error in place of a result. The results do not include the machine's load.

    Raises any error of the baseline.
    """
    limit_s = clock.comparison_s if rounds.time_limit_s is None else rounds.time_limit_s
    timers = [Timer(run, clock, clock.every_round, warms_up=False) for run in (baseline, *runs)]
    for number in sample_in_rounds(timers):
        if timers[0].error is not None:
            raise timers[0].error
        spent_s = sum(timer.spent_s for timer in timers)
        if number == 1 and spent_s < rounds.warm_up_s:
            for timer in timers:
                timer.samples_s.clear()
            continue
        if rounds.race:
            _drop_lapped(timers[1:])
        racing = [_compared(timers[0], timer) for timer in timers[1:] if timer.stop is None]
        if rounds.is_enough(len(timers[0].samples_s), racing, spent_s, limit_s):
            break
    return [timer.error or _compared(timers[0], timer) for timer in timers[1:]]


def _compared(baseline: Timer, timer: Timer) -> WholeRun:
    """Compare a call's timer with the baseline's, over the rounds in which both ran."""
    return WholeRun.of(baseline.samples_s[: len(timer.samples_s)], timer.samples_s)


def _drop_lapped(timers: Sequence[Timer]) -> None:
    racing = [timer for timer in timers if timer.stop is None]
    for timer in racing:
        if any(_is_lapped(timer, other) for other in racing):
            timer.stop = Stop.DROPPED


def _is_lapped(timer: Timer, other: Timer) -> bool:
    pairs = list(zip(timer.samples_s, other.samples_s, strict=True))
    return len(pairs) >= _LAPPED and all(own_s > _LAP * other_s for own_s, other_s in pairs)


def _is_obvious(result: WholeRun, done: int, is_long: bool) -> bool:
    """Whether the call was much faster than the baseline in each of the ``done`` rounds, or slower in each of three."""
    assert result.raw is not None
    least, most = min(result.raw.speedups), max(result.raw.speedups)
    if done >= 2 and is_long and (least > _FAR_AHEAD or most < 1 / _FAR_AHEAD):
        return True
    return done >= 3 and (least > _AHEAD or most < 1)
