"""Trainings of several models side by side, and how far they part.

Any two implementations round differently, and training amplifies the differences. Losses are therefore compared step by
step, but gradients only in the first step, where all models have the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mucudnn.bench.sources.trainee import Batch, Trainee
from mucudnn.kernels.torch_convolution import relative_l2_error


@dataclass(frozen=True, slots=True)
class Training:
    """The losses of the steps of a training, and the gradients of the first."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    def gradient_difference(self, reference: Training) -> float:
        """Return the largest relative difference ‖a - b‖ / ‖b‖ of a parameter's gradient in the first step."""
        return max(map(relative_l2_error, self.gradients, reference.gradients))

    def loss_difference(self, reference: Training) -> float:
        """Return the largest relative difference of the loss of a step."""
        return max(abs(a / b - 1) for a, b in zip(self.losses, reference.losses, strict=True))


def trained(model: nn.Module, batches: Sequence[Batch]) -> Training:
    """Train the model for one step per batch, with random numbers that depend on the step alone."""
    training, trainee = Training(), Trainee(model)
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        training.losses.append(trainee.learn(*batch).item())
        if seed == 0:
            training.gradients.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
    return training
