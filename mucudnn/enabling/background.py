"""Measures between steps, in the thread that runs them, so that nothing competes with a step for the processor.

Between steps means at the end of a backward pass, and without gradients before a convolution. There one problem is
measured, if measuring has taken at most a twentieth of the time so far, and no other thread has computed convolutions
lately. So a training waits for one problem at a time, at most a twentieth of the time in the long run, and every
problem is tuned in the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident

import torch

from mucudnn.enabling.status import ShapeStats

SHARE = 0.05  # of the time, for measuring
_ALONE_S = 1.0  # since another thread computed a convolution


class Background:
    """Queue of what is to be measured later. measure: does it. clock: seconds."""

    def __init__(self, measure: Callable[[ShapeStats], None], clock: Callable[[], float]) -> None:
        self.queue: deque[ShapeStats] = deque()
        self.spent_s = 0.0
        self._measure, self._clock, self._began = measure, clock, clock()
        self._computed_at: dict[int, float] = {}  # thread -> when it last computed a convolution
        self._is_asked = False

    def put_off(self, met: ShapeStats) -> None:
        """Have it measured later."""
        self.queue.append(met)

    def before_call(self) -> None:
        """Note that this thread computes a convolution; without gradients, measure first."""
        self._computed_at[get_ident()] = self._clock()
        if self.queue and not torch.is_grad_enabled():
            self.work()

    def before_backward(self) -> None:
        """Note that this thread computes gradients, and ask to be called when the backward pass ends."""
        self._computed_at[get_ident()] = self._clock()
        if self.queue and not self._is_asked:
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
            except RuntimeError:  # called by itself, in no backward pass
                self.work()
            else:
                self._is_asked = True

    def work(self) -> None:
        """Measure one problem, if that is due."""
        now = self._clock()
        is_due = self.spent_s <= SHARE * (now - self._began)
        if self.queue and is_due and self._is_alone(now):
            self._measure(self.queue.popleft())
            self.spent_s += self._clock() - now

    def _after_backward(self) -> None:
        self._is_asked = False
        self.work()

    def _is_alone(self, now: float) -> bool:
        me = get_ident()
        return all(thread == me or now - at > _ALONE_S for thread, at in list(self._computed_at.items()))
