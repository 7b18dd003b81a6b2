"""Rounds of samples: each round samples every timer, so that a slow minute of the machine hits all of them.

The order is drawn anew for each round. In a fixed order a call always follows the same other one, which leaves it the
caches and the heap as they suit it, or do not: one of two equal calls then seems up to a quarter slower, since only it
finds no memory that was touched before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random

from mucudnn.measuring.timing.timer import Stop, Timer


def sample_in_rounds(timers: Sequence[Timer]) -> Iterator[int]:
    """Sample all timers round by round until each has stopped. Yields the number of rounds after each of them."""
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

    A timer that ``is_hopeless`` after a round is dropped: it keeps its samples and is yielded like the others.
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
