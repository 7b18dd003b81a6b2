"""Times contestants in turns: every round samples each of them, so that a slow minute of the machine hits all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mucudnn.measuring.timing.timer import EVERY_ROUND, Clock, Runner, StoppingRule, Timer, here, sample_in_rounds


@dataclass(frozen=True, slots=True)
class Contestant:
    """A call to be timed, and where it is made. The clock is read there, too, so that getting there costs nothing."""

    call: Callable[[], object]
    runner: Runner = here


Samples = tuple[float, ...]  # seconds, one a round, in their order


@dataclass(frozen=True, slots=True)
class TurnRounds:
    """Number of rounds: ``least``, and more while the contestants took less than ``short_s`` each, up to ``most``.

    Short calls need more samples: an interruption is a larger part of them, and they cost little.
    """

    least: int
    most: int
    short_s: float

    def is_enough(self, done: int, timers: Sequence[Timer]) -> bool:
        """Tell whether no further round is needed."""
        if done < self.least:
            return False
        return done >= self.most or sum(timer.spent_s for timer in timers) >= self.short_s * len(timers)


def try_in_turns(
    contestants: Sequence[Contestant], rounds: TurnRounds, clock: Clock, rule: StoppingRule = EVERY_ROUND
) -> list[Samples | Exception]:
    """Return the samples of each contestant, after a call that does not count, or the error of one that fails.

    The others go on.
    """
    timers = [Timer(contestant.call, clock, rule, runner=contestant.runner) for contestant in contestants]
    for done in sample_in_rounds(timers):
        if rounds.is_enough(done, timers):
            break
    return [timer.error or tuple(timer.samples_s) for timer in timers]


def time_in_turns(
    contestants: Sequence[Contestant], rounds: int, clock: Clock, rule: StoppingRule = EVERY_ROUND
) -> list[Samples]:
    """Time each contestant in every one of ``rounds`` rounds, after a call that does not count.

    Raises the error of the first that fails.
    """
    found = []
    for times in try_in_turns(contestants, TurnRounds(rounds, rounds, 0.0), clock, rule):
        if isinstance(times, Exception):
            raise times
        found.append(times)
    return found
