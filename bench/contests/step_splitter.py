"""Splits training steps: each convolution is timed where it runs, and what is left is the rest of the step.

Steps that are split are none of those whose time is told: the clock is read around every convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Self

from torch import nn

from mucudnn.measuring.timing.timer import Clock, Runner, here
from mucudnn.optimizing.in_place import InPlaceTimes
from mucudnn.words.problem import Operation


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds of a step's parts: convolutions in place, forward and backward, and all that is not a convolution."""

    forward_s: float
    backward_s: float
    rest_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.rest_s

    @classmethod
    def median(cls, samples: Sequence[Self]) -> Self:
        """Return each part's median; there must be a sample."""
        return cls(
            forward_s=median(one.forward_s for one in samples),
            backward_s=median(one.backward_s for one in samples),
            rest_s=median(one.rest_s for one in samples),
        )


@dataclass(slots=True, eq=False)
class StepSplitter:
    """Splits steps of a model in rounds, as ``Timer`` times them. runner: where steps run, and the clock is read."""

    step: Callable[[], object]
    clock: Clock
    runner: Runner
    times: InPlaceTimes
    samples: list[StepSplit] = field(default_factory=list)
    _is_warm: bool = False

    @classmethod
    def of(
        cls, model: nn.Module, step: Callable[[], object], clock: Clock, runner: Runner = here, device: str = "cpu"
    ) -> StepSplitter:
        """Make one for steps of a model on this type of device. Raises ``UnavailableError`` as ``InPlaceTimes``."""
        return cls(step, clock, runner, InPlaceTimes(model, device))

    def sample(self, steps: int) -> None:
        """Run ``steps`` steps in a row, and note what one took. A first call before, which is not noted, is slower.

        Raises what a step raises, and ``UnavailableError`` where convolutions cannot be recorded.
        """
        if not self._is_warm:
            self._split(1)
            self._is_warm = True
        self.samples.append(self._split(steps))

    def _split(self, steps: int) -> StepSplit:
        with self.times.recording():
            elapsed_s = self.runner(lambda: self.clock.time(self.step, steps))
        forward_s = backward_s = 0.0
        for place, spent in self.times.take().items():
            if Operation.FORWARD in place.operations:
                forward_s += spent.time_s
            else:
                backward_s += spent.time_s
        return StepSplit(forward_s / steps, backward_s / steps, (elapsed_s - forward_s - backward_s) / steps)
