"""Interleaved timing of contestants: each round times every contestant, so that slow moments of the machine hit all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mucudnn.measuring.timing.timer import EVERY_ROUND, Clock, Runner, StoppingRule, Timer, here, sample_in_rounds


@dataclass(frozen=True, slots=True)
class Contestant:
    """A call to be timed. runner: makes the call and reads the clock, so that the runner's overhead is not timed."""

    call: Callable[[], object]
    runner: Runner = here


Samples = tuple[float, ...]  # seconds, one per round, in order


@dataclass(frozen=True, slots=True)
class TurnRounds:
    """A rule for the number of rounds: from ``least`` to ``most``, until contestants took ``short_s`` s on average.

    So short calls get more samples, since interruptions weigh more in short times.
    """

    least: int
    most: int
    short_s: float

    def is_enough(self, done: int, timers: Sequence[Timer]) -> bool:
        """Whether the contestants need no further round after the ``done`` rounds so far."""
        if done < self.least:
            return False
        return done >= self.most or sum(timer.spent_s for timer in timers) >= self.short_s * len(timers)


def try_in_turns(
    contestants: Sequence[Contestant], rounds: TurnRounds, clock: Clock, rule: StoppingRule = EVERY_ROUND
) -> list[Samples | Exception]:
    """Return for each contestant its times, after a warm-up call, or its error.

    A contestant that fails does not stop the others.
    """
    timers = [Timer(contestant.call, clock, rule, runner=contestant.runner) for contestant in contestants]
    for done in sample_in_rounds(timers):
        if rounds.is_enough(done, timers):
            break
    return [timer.error or tuple(timer.samples_s) for timer in timers]


def time_in_turns(
    contestants: Sequence[Contestant], rounds: int, clock: Clock, rule: StoppingRule = EVERY_ROUND
) -> list[Samples]:
    """Return the seconds of one call of each contestant per round, after a warm-up call of each.

    Raises the first error of a contestant.
    """
    found = []
    for times in try_in_turns(contestants, TurnRounds(rounds, rounds, 0.0), clock, rule):
        if isinstance(times, Exception):
            raise times
        found.append(times)
    return found
