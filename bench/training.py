"""The same training, step by step in turns, by models that should not differ: how fast each is, how far they part."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One training step; ``gradients`` are those of the parameters, in their order."""

    time_s: float
    loss: float
    gradients: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class TrainingComparison:
    """Steps of two models from the same seed. Differences are relative: to the loss, to the norm of the gradient."""

    torch_step_s: float
    mucudnn_step_s: float
    losses: tuple[float, ...]
    loss_difference: float
    gradient_difference: float

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
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        elapsed_s = time.perf_counter() - start
        gradients = tuple(p.grad.clone() for p in self.model.parameters() if p.grad is not None)
        return Step(elapsed_s, loss.item(), gradients)


def labelled_batches(steps: int, batch_size: int, shape: tuple[int, int, int], classes: int = 10) -> Iterator[Batch]:
    """Random images with labels that can be learnt: each class has its own random pattern, under as much noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, *shape, generator=generator)
    for _ in range(steps):
        labels = torch.randint(classes, (batch_size,), generator=generator)
        yield patterns[labels] + torch.randn(batch_size, *shape, generator=generator), labels


def train_in_turns(torch_model: nn.Module, mucudnn_model: nn.Module, batches: Iterable[Batch]) -> TrainingComparison:
    """Every batch is one step of either model; the first step is a warm-up, whose time does not count."""
    trainees = Trainee(torch_model), Trainee(mucudnn_model)
    pairs = [
        tuple(trainee.step(images, labels, seed) for trainee in trainees)
        for seed, (images, labels) in enumerate(batches)
    ]
    baseline, ours = zip(*pairs, strict=True)
    return TrainingComparison(
        torch_step_s=_median_s(baseline),
        mucudnn_step_s=_median_s(ours),
        losses=tuple(step.loss for step in ours),
        loss_difference=max(abs(a.loss - b.loss) / abs(a.loss) for a, b in pairs),
        gradient_difference=max(_gradient_difference(a, b) for a, b in pairs),
    )


def _median_s(steps: Sequence[Step]) -> float:
    return median(step.time_s for step in steps[1:])


def _gradient_difference(a: Step, b: Step) -> float:
    """The largest ‖a - b‖ / ‖a‖ of any parameter's gradient."""
    pairs = zip(a.gradients, b.gradients, strict=True)
    return max(float((g - h).norm() / g.norm()) for g, h in pairs)
