"""Interleaved timing of contestants: every round samples each one, so that slow phases of the machine hit all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mucudnn.measuring.timing.timer import EVERY_ROUND, Clock, Runner, StoppingRule, Timer, here, sample_in_rounds


@dataclass(frozen=True, slots=True)
class Contestant:
    """A call to be timed. runner: makes the call and reads the clock, so that its own overhead is not timed."""

    call: Callable[[], object]
    runner: Runner = here


Samples = tuple[float, ...]  # seconds, one per round, in order


@dataclass(frozen=True, slots=True)
class TurnRounds:
    """The number of rounds: at least ``least``, then until contestants took ``short_s`` on average, at most ``most``.

    Short calls get more samples, since interruptions weigh more in them.
    """

    least: int
    most: int
    short_s: float

    def is_enough(self, done: int, timers: Sequence[Timer]) -> bool:
        """Whether no further round is needed."""
        if done < self.least:
            return False
        return done >= self.most or sum(timer.spent_s for timer in timers) >= self.short_s * len(timers)


def try_in_turns(
    contestants: Sequence[Contestant], rounds: TurnRounds, clock: Clock, rule: StoppingRule = EVERY_ROUND
) -> list[Samples | Exception]:
    """Return the samples of each contestant, after a warm-up call, or its error. A failure does not stop the others."""
    timers = [Timer(contestant.call, clock, rule, runner=contestant.runner) for contestant in contestants]
    for done in sample_in_rounds(timers):
        if rounds.is_enough(done, timers):
            break
    return [timer.error or tuple(timer.samples_s) for timer in timers]


def time_in_turns(
    contestants: Sequence[Contestant], rounds: int, clock: Clock, rule: StoppingRule = EVERY_ROUND
) -> list[Samples]:
    """Time each contestant once per round, after a warm-up call. Raises the first error of a contestant."""
    found = []
    for times in try_in_turns(contestants, TurnRounds(rounds, rounds, 0.0), clock, rule):
        if isinstance(times, Exception):
            raise times
        found.append(times)
    return found
