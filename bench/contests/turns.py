"""Calls that are timed in turns: every round takes a sample of each, so that a slow minute of the machine hits all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mucudnn.bench.measure.timer import EVERY_ROUND, Clock, Timer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cell:
    """One of the calls: its seconds (median over the rounds), and their IQR / median."""

    time_s: float
    noise: float

    @classmethod
    def of(cls, timer: Timer) -> Cell:
        return cls(timer.median_s, timer.noise)


class Runner(Protocol):
    """Where, and under which settings, a function is called."""

    def __call__(self, function: Callable[[], T], /) -> T:
        """What the function returns; raises what it raises."""


def here(function: Callable[[], T]) -> T:
    """In this thread, under the settings that there are."""
    return function()


@dataclass(frozen=True, slots=True)
class Turn:
    """What is timed, and where: the clock is read there, too, so that getting there costs nothing."""

    call: Callable[[], object]
    runner: Runner = here


def take_turns(turns: Sequence[Turn], rounds: int, clock: Clock) -> list[Cell]:
    """Time each turn in every one of ``rounds`` rounds, after a call that does not count.

    Raises the error of the first that fails.
    """
    timers = [Timer(turn.call, clock, EVERY_ROUND) for turn in turns]
    for _ in range(rounds):
        for turn, timer in zip(turns, timers, strict=True):
            turn.runner(timer.sample)
            if timer.error is not None:
                raise timer.error
    return [Cell.of(timer) for timer in timers]
