"""Measures training steps with torch's convolutions and with mucudnn's, in turns, at several local batches.

A local batch is the number of samples on one device. An additional step reads the clock at every gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.measuring.clocks import Clock
from mucudnn.tuning.own_step import OwnStep

_TUNING = 0.9  # share of the progress bar


class Convolutions(StrEnum):
    """The convolutions of a step: torch's own, or mucudnn's choices."""

    TORCH = "torch"
    MUCUDNN = "mucudnn"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured training step: its seconds, and the fractions of it at which gradients are ready and backward ends.

    ready: ascending, in the order of ``MeasuredSteps.gradients``.
    """

    local_batch: int
    step_s: float
    ready: tuple[float, ...]
    backward_end: float


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Measured training steps by ascending local batch, and the bytes of each gradient.

    gradients: in the order in which they become ready.
    """

    gradients: tuple[int, ...]
    steps: Mapping[Convolutions, tuple[MeasuredStep, ...]]


def measure_steps(
    model: nn.Module,
    arguments_of: Callable[[int], tuple[Any, ...]],
    local_batches: Sequence[int],
    tuned: Callable[[nn.Module, tuple[Any, ...], Progress], nn.Module],
    clock: Clock,
    *,
    rounds: int = 5,
    progress: Progress = silent,
) -> MeasuredSteps:
    """Measure training steps of a model: forward pass, backward pass, and gradient descent with momentum.

    arguments_of: makes the model's arguments for a number of samples. tuned: converts a copy of the model to mucudnn's
    convolutions for these arguments; where its step is slower, torch's counts, which ``optimize`` would restore.
    rounds: number of rounds over both kinds of convolutions at each local batch, after a warm-up round. The learning
    rate is 0, so that parameters do not change.

    Raises ``InvalidInputError`` if no parameter of the model gets a gradient.
    """
    found: dict[Convolutions, list[MeasuredStep]] = {which: [] for which in Convolutions}
    order: list[str] = []
    share = 1 / len(local_batches)
    for index, n in enumerate(sorted(local_batches, reverse=True)):
        arguments = arguments_of(n)
        ours = tuned(deepcopy(model), arguments, share_of(progress, index * share, _TUNING * share))
        both = [_Step(one, OwnStep(arguments), clock) for one in (model, ours)]
        samples_s: list[list[float]] = [[], []]
        for number in range(rounds + 1):
            progress(f"steps of {n} samples", (index + _TUNING + (1 - _TUNING) * number / (rounds + 1)) * share)
            for step, taken in zip(both, samples_s, strict=True):
                taken.append(clock.time(step, 1))
        times_s = [median(taken[1:]) for taken in samples_s]
        moments = [step.moments() for step in both]
        order = order or sorted(moments[0][0], key=moments[0][0].__getitem__)
        which_runs = (0, int(times_s[1] < times_s[0]))
        for which, place in zip(Convolutions, which_runs, strict=True):
            ready, end = moments[place]
            parts = np.minimum(np.maximum.accumulate([ready[name] for name in order]), end).tolist()
            found[which].insert(0, MeasuredStep(n, times_s[place], tuple(parts), end))
    if not order:
        raise InvalidInputError("no parameter of the model gets a gradient, so there is nothing to reduce")
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    return MeasuredSteps(tuple(sizes[name] for name in order), {which: tuple(steps) for which, steps in found.items()})


class _Step:
    """A training step of a model on its arguments."""

    def __init__(self, model: nn.Module, step: OwnStep, clock: Clock) -> None:
        self.model, self.clock, self._own = model, clock, step
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def __call__(self) -> None:
        self._own(self.model)
        self._optimizer.step()

    def moments(self) -> tuple[dict[str, float], float]:
        """Run a step; return the fractions of it at which each gradient was ready and the backward pass ended."""
        moments: dict[str, float] = {}
        begun_s = self.clock.now()
        with _noted(self.model, moments, self.clock):
            self._own(self.model)
        backward_end_s = self.clock.now()
        self._optimizer.step()
        elapsed_s = self.clock.now() - begun_s
        parts = {name: (moment - begun_s) / elapsed_s for name, moment in moments.items()}
        return parts, (backward_end_s - begun_s) / elapsed_s


@contextmanager
def _noted(model: nn.Module, moments: dict[str, float], clock: Clock) -> Iterator[None]:
    """Within this context, record in ``moments`` the time at which each parameter's gradient is complete."""

    def hook_of(name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            moments[name] = clock.now()

        return note

    handles = [
        parameter.register_post_accumulate_grad_hook(hook_of(name))  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
