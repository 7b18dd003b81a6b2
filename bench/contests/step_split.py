"""Parts of a training step: its convolutions, and all the rest. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self


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

    @property
    def step_s(self) -> float:
        return self.convolutions_s + self.rest_s

    @classmethod
    def median(cls, samples: Sequence[Self]) -> Self:
        """Return each part's median; there must be a sample."""
        return cls(
            forward_s=median(one.forward_s for one in samples),
            backward_s=median(one.backward_s for one in samples),
            rest_s=median(one.rest_s for one in samples),
        )
