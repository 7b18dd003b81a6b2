"""The same training, step by step in turns, by models that should not differ: how fast each is, how far they part.

In float32 they do part: where a maximum or a ReLU is decided by the last bit, a rounding sends a gradient elsewhere,
and every step adds to it. So gradients are compared in the first step, where all models have the same weights: with
torch's, and with those of float64. Torch is also compared with itself in the other memory format: the yardstick.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.bench.measure.operands import input_shape

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One training step."""

    time_s: float
    loss: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest relative differences of two trainings: of any step's loss, of any gradient in the first step."""

    loss: float
    gradient: float


@dataclass(frozen=True, slots=True)
class GradientErrors:
    """Largest relative L2 errors of a parameter's gradient in the first step, against float64."""

    torch: float
    mucudnn: float


@dataclass(frozen=True, slots=True)
class TrainingComparison:
    """Steps of mucudnn and of torch from the same seed. ``yardstick``: torch in channels_last against torch."""

    torch_step_s: float
    mucudnn_step_s: float
    losses: tuple[float, ...]
    difference: Difference
    yardstick: Difference
    errors: GradientErrors

    @property
    def speedup(self) -> float:
        return self.torch_step_s / self.mucudnn_step_s


class Trainee:
    """A model with its optimizer (stochastic gradient descent with momentum)."""

    def __init__(self, model: nn.Module, learning_rate: float = 0.01) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor, seed: int) -> Step:
        """images: (N, C, H, W), labels: (N,). ``seed`` decides what dropout drops."""
        torch.manual_seed(seed)
        start = time.perf_counter()
        loss = self.learn(images, labels)
        elapsed_s = time.perf_counter() - start
        return Step(elapsed_s, loss.item())

    def learn(self, images: Tensor, labels: Tensor, autocast: torch.dtype | None = None) -> Tensor:
        """The step alone, not waited for. Returns the loss. autocast: what forward pass and loss are computed in, where
        torch's autocast allows it; ``None``: in the parameters' dtype.
        """
        self.optimizer.zero_grad()
        with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
            loss = F.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss


def labelled_batches(steps: int, batch_size: int, shape: tuple[int, int, int], classes: int = 10) -> Iterator[Batch]:
    """Random images with labels that can be learnt: each class has its own random pattern, under as much noise.

    Raises ``InvalidInputError`` for batches of too many elements.
    """
    x_shape = input_shape(batch_size, shape)
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, *shape, generator=generator)
    for _ in range(steps):
        labels = torch.randint(classes, (batch_size,), generator=generator)
        yield patterns[labels] + torch.randn(x_shape, generator=generator), labels


def train_in_turns(torch_model: nn.Module, mucudnn_model: nn.Module, batches: Iterable[Batch]) -> TrainingComparison:
    """Every batch is one step of either model; the first step is a warm-up, whose time does not count.

    The yardstick and float64 come afterwards: a third model's memory in between would slow the other two.
    """
    kept = list(batches)
    again, ours_again = copy.deepcopy(torch_model), copy.deepcopy(mucudnn_model)
    baseline, ours, difference = _in_turns(torch_model, mucudnn_model, kept)
    channels_last = copy.deepcopy(again).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    errors = _gradient_errors(copy.deepcopy(again), ours_again, kept[0])
    _, _, yardstick = _in_turns(again, channels_last, kept)
    return TrainingComparison(
        torch_step_s=_median_s(baseline),
        mucudnn_step_s=_median_s(ours),
        losses=tuple(step.loss for step in ours),
        difference=difference,
        yardstick=yardstick,
        errors=errors,
    )


def _in_turns(
    reference: nn.Module, model: nn.Module, batches: Sequence[Batch]
) -> tuple[list[Step], list[Step], Difference]:
    """The steps of both, and how far ``model`` is from the reference."""
    trainees = Trainee(reference), Trainee(model)
    steps: tuple[list[Step], list[Step]] = ([], [])
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
    """Trains untrained models by one step, and torch's once more in float64."""
    images, labels = first
    exact = copy.deepcopy(torch_model).double()
    Trainee(exact).step(images.double(), labels, seed=0)
    for model in (torch_model, mucudnn_model):
        Trainee(model).step(images, labels, seed=0)
    return GradientErrors(_gradient_difference(exact, torch_model), _gradient_difference(exact, mucudnn_model))


def _median_s(steps: Sequence[Step]) -> float:
    return median(step.time_s for step in steps[1:])


def _gradient_difference(reference: nn.Module, model: nn.Module) -> float:
    """The largest ‖a - b‖ / ‖a‖ of any parameter's gradient."""
    pairs = zip(reference.parameters(), model.parameters(), strict=True)
    gradients = [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
    return max(float((a - b).norm() / a.norm()) for a, b in gradients)
