"""Measuring between steps, in the thread that runs them, so that it does not compete with a step for the processor.

Between steps means at the end of a backward pass or, without gradients, before a convolution. One problem is measured
there if measuring has taken at most 5 % of the time so far and no other thread has computed convolutions in the last
second. So training waits for one problem at a time, in the long run 5 % of the time, until all problems are tuned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import get_ident

import torch

from mucudnn.enabling.status import ShapeStats

SHARE = 0.05  # largest share of the time for measuring
_ALONE_S = 1.0  # least time since another thread computed a convolution


class Background:
    """Queue of problems (convolutions of one size) to measure later, between steps.

    measure: function that measures one problem. clock: function that returns seconds.
    """

    def __init__(self, measure: Callable[[ShapeStats], None], clock: Callable[[], float]) -> None:
        self.queue: deque[ShapeStats] = deque()
        self.spent_s = 0.0
        self._measure, self._clock, self._began = measure, clock, clock()
        self._computed_at: dict[int, float] = {}  # thread -> when it last computed a convolution
        self._is_asked = False

    def put_off(self, met: ShapeStats) -> None:
        """Add a problem to the queue, to be measured later."""
        self.queue.append(met)

    def before_call(self) -> None:
        """Note that this thread computes a convolution.

        Without gradients, first measure a problem of the queue if it is time.
        """
        self._computed_at[get_ident()] = self._clock()
        if self.queue and not torch.is_grad_enabled():
            self.work()

    def before_backward(self) -> None:
        """Note that this thread computes gradients, and have ``work`` called at the end of the backward pass."""
        self._computed_at[get_ident()] = self._clock()
        if self.queue and not self._is_asked:
            try:
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
            except RuntimeError:  # called directly, outside any backward pass
                self.work()
            else:
                self._is_asked = True

    def work(self) -> None:
        """Measure one problem of the queue if the time limit allows and no other thread computes convolutions."""
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
