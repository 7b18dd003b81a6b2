"""Measures training steps at several local batches (samples on one device): times, and when each gradient is ready.

Timed steps alternate with instrumented ones, which read the clock at every gradient. The readings are stored as
fractions of the step.
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
    """A measured training step: its seconds, and the fractions of it at which gradients are ready and backward ends.

    ready: ascending, in the order of ``MeasuredSteps.gradients``.
    """

    local_batch: int
    step_s: float
    ready: tuple[float, ...]
    backward_end: float


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Measured training steps by ascending local batch, and name and bytes of each gradient.

    gradients: in the order in which they become ready.
    """

    gradients: tuple[tuple[str, int], ...]
    steps: tuple[MeasuredStep, ...]

    @property
    def size_bytes(self) -> int:
        """Total bytes of all gradients of a step."""
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
    """Measure training steps of a model: forward pass, backward pass, and gradient descent with momentum.

    arguments_of: makes the model's arguments for a number of samples. rounds: number of rounds over all local batches,
    after a warm-up round. together: called before each step, to synchronize ranks that compute at the same time. The
    learning rate is 0, so that parameters do not change.

    Raises ``InvalidInputError`` if no parameter of the model gets a gradient.
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
        raise InvalidInputError("no parameter of the model gets a gradient, so there is nothing to reduce")
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    return MeasuredSteps(
        tuple((name, sizes[name]) for name in order), tuple(step.result(order, n) for n, step in watched.items())
    )


@dataclass(slots=True, eq=False)
class _WatchedStep:
    """A recorder of steps of one local batch in pairs: a timed step, and one that reads the clock at every gradient."""

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
        """Run a step; return the fractions of it at which each gradient was ready and the backward pass ended."""
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
