"""Measures training steps of torch's at several local batches: how long they take, and when each gradient is ready.

Steps that are looked into are none of those whose time is told: the clock is read at every gradient, and what it says
counts as a part of a step's time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mucudnn.measuring.timing.timer import Clock
from mucudnn.tracing.own_step import OwnStep
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.progress import Progress, silent


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A training step: its seconds, and at which parts of them gradients are ready and the backward pass is over.

    ready: one for each gradient, ascending, in the order of ``MeasuredSteps.gradients``.
    """

    local_batch: int
    step_s: float
    ready: tuple[float, ...]
    backward_end: float


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps by ascending local batch, and the gradients in the order in which they become ready: name and bytes."""

    gradients: tuple[tuple[str, int], ...]
    steps: tuple[MeasuredStep, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(size for _, size in self.gradients)


def measure_steps(
    model: nn.Module,
    arguments_of: Callable[[int], tuple[Any, ...]],
    local_batches: Sequence[int],
    clock: Clock,
    *,
    rounds: int = 5,
    together: Callable[[], object] = lambda: None,
    progress: Progress = silent,
) -> MeasuredSteps:
    """Measure steps of a model in training mode: forward pass, backward pass, gradient descent with momentum.

    arguments_of: of a number of samples, all that the model is called with. The rate of learning is 0, so that its
    parameters stay as they are. rounds: of all local batches in turn, after one that is not counted. together: called
    before each step, for ranks that are to compute at the same time.

    Raises ``InvalidInputError`` for a model of which no parameter gets a gradient.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    watched = {n: _WatchedStep(model, arguments_of(n), optimizer, clock) for n in sorted({*local_batches})}
    for number in range(rounds + 1):
        for n, step in watched.items():
            progress(f"steps of {n} samples", number / (rounds + 1))
            together()
            step.sample(is_counted=number > 0)
    order = watched[max(watched)].order()
    if not order:
        raise InvalidInputError("no parameter of the model gets a gradient in a step, so there is nothing to reduce")
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    return MeasuredSteps(
        tuple((name, sizes[name]) for name in order), tuple(step.result(order, n) for n, step in watched.items())
    )


@dataclass(slots=True, eq=False)
class _WatchedStep:
    """Steps of one local batch, in pairs: one is timed, and one is looked into."""

    model: nn.Module
    arguments: tuple[Any, ...]
    optimizer: torch.optim.Optimizer
    clock: Clock
    step_s: list[float] = field(default_factory=list)
    ready: dict[str, list[float]] = field(default_factory=dict)
    backward_end: list[float] = field(default_factory=list)
    _own: OwnStep = field(init=False)

    def __post_init__(self) -> None:
        self._own = OwnStep(self.arguments)

    def sample(self, is_counted: bool) -> None:
        step_s = self.clock.time(self._run, 1)
        ready, backward_end = self._looked_into()
        if is_counted:
            self.step_s.append(step_s)
            self.backward_end.append(backward_end)
            for name, part in ready.items():
                self.ready.setdefault(name, []).append(part)

    def order(self) -> list[str]:
        return sorted(self.ready, key=lambda name: median(self.ready[name]))

    def result(self, order: Sequence[str], local_batch: int) -> MeasuredStep:
        backward_end = median(self.backward_end)
        parts = np.maximum.accumulate([median(self.ready[name]) for name in order])
        ready = np.minimum(parts, backward_end).tolist()
        return MeasuredStep(local_batch, median(self.step_s), tuple(ready), backward_end)

    def _run(self) -> None:
        self._own(self.model)
        self.optimizer.step()

    def _looked_into(self) -> tuple[dict[str, float], float]:
        """Return the parts of a step's time at which each gradient was ready, and the backward pass over."""
        moments: dict[str, float] = {}
        begun_s = self.clock.now()
        with _noted(self.model, moments, self.clock):
            self._own(self.model)
        backward_end_s = self.clock.now()
        self.optimizer.step()
        elapsed_s = self.clock.now() - begun_s
        parts = {name: (moment - begun_s) / elapsed_s for name, moment in moments.items()}
        return parts, (backward_end_s - begun_s) / elapsed_s


@contextmanager
def _noted(model: nn.Module, moments: dict[str, float], clock: Clock) -> Iterator[None]:
    """Note when each parameter's gradient is whole."""

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
