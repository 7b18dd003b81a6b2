"""Trains models side by side that should not differ: how fast each is, and how far they part.

In float32 they do part. Where a maximum or a ReLU is decided by the last bit, a rounding sends a gradient elsewhere,
and every step adds to it. So gradients are compared in the first step, where all models have the same weights: with
torch's, and with those of float64. Torch is also compared with itself in the other memory format: that is the
yardstick.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from mucudnn.bench.sources.trainee import Batch, TrainedStep, Trainee


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest relative differences of two trainings: of any step's loss, and of any gradient in the first step."""

    loss: float
    gradient: float


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """Largest relative L2 errors of a parameter's gradient in the first step, against float64."""

    torch: float
    mucudnn: float


@dataclass(frozen=True, slots=True)
class TrainingComparison:
    """Steps of mucudnn and of torch from the same seed. ``yardstick``: torch in channels_last against torch.

    torch_s, mucudnn_s: seconds of each step but the first, in turns. losses: of mucudnn, step by step.
    """

    torch_s: tuple[float, ...]
    mucudnn_s: tuple[float, ...]
    losses: tuple[float, ...]
    difference: Difference
    yardstick: Difference
    errors: GradientErrors

    @property
    def torch_step_s(self) -> float:
        return median(self.torch_s)

    @property
    def mucudnn_step_s(self) -> float:
        return median(self.mucudnn_s)

    @property
    def speedup(self) -> float:
        return self.torch_step_s / self.mucudnn_step_s


def train_in_turns(torch_model: nn.Module, mucudnn_model: nn.Module, batches: Iterable[Batch]) -> TrainingComparison:
    """Train both models in turns: every batch is one step of either. The first step is a warm-up that is not timed.

    The yardstick and float64 come afterwards: a third model's memory in between would slow the other two.
    """
    kept = list(batches)
    again, ours_again = copy.deepcopy(torch_model), copy.deepcopy(mucudnn_model)
    baseline, ours, difference = _in_turns(torch_model, mucudnn_model, kept)
    channels_last = copy.deepcopy(again).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    errors = _gradient_errors(copy.deepcopy(again), ours_again, kept[0])
    _, _, yardstick = _in_turns(again, channels_last, kept)
    return TrainingComparison(
        torch_s=_timed(baseline),
        mucudnn_s=_timed(ours),
        losses=tuple(step.loss for step in ours),
        difference=difference,
        yardstick=yardstick,
        errors=errors,
    )


def _in_turns(
    reference: nn.Module, model: nn.Module, batches: Sequence[Batch]
) -> tuple[list[TrainedStep], list[TrainedStep], Difference]:
    """The steps of both, and how far ``model`` is from the reference."""
    trainees = Trainee(reference), Trainee(model)
    steps: tuple[list[TrainedStep], list[TrainedStep]] = ([], [])
    loss = gradient = 0.0
    for seed, (images, labels) in enumerate(batches):
        a, b = (trainee.step(images, labels, seed) for trainee in trainees)
        steps[0].append(a)
        steps[1].append(b)
        loss = max(loss, abs(a.loss - b.loss) / abs(a.loss))
        if seed == 0:
            gradient = _gradient_difference(reference, model)
    return *steps, Difference(loss, gradient)


def _gradient_errors(torch_model: nn.Module, mucudnn_model: nn.Module, first: Batch) -> GradientErrors:
    """Errors of both models, made by one step of each, and one of torch's model in float64."""
    images, labels = first
    exact = copy.deepcopy(torch_model).double()
    Trainee(exact).step(images.double(), labels, seed=0)
    for model in (torch_model, mucudnn_model):
        Trainee(model).step(images, labels, seed=0)
    return GradientErrors(_gradient_difference(exact, torch_model), _gradient_difference(exact, mucudnn_model))


def _timed(steps: Sequence[TrainedStep]) -> tuple[float, ...]:
    return tuple(step.time_s for step in steps[1:])


def _gradient_difference(reference: nn.Module, model: nn.Module) -> float:
    """The largest ‖a - b‖ / ‖a‖ of any parameter's gradient."""
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    gradients = [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
    return max(float((a - b).norm() / a.norm()) for a, b in gradients)
