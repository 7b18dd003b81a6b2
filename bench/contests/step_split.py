"""Parts of a training step: its convolutions, and all the rest. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds of a step's parts: convolutions in place, forward and backward, and all that is not a convolution.

    Each is a median over rounds of its own, in which the clock is read around every convolution; so their sum is not
    quite the time of a step.
    """

    forward_s: float
    backward_s: float
    rest_s: float

    @property
    def convolutions_s(self) -> float:
        return self.forward_s + self.backward_s
