"""The same training, step by step in turns, by models that should not differ: how fast each is, how far they part.

In float32 they do part: where a maximum or a ReLU is decided by the last bit, a rounding sends a gradient elsewhere,
and every step adds to it. So torch is also compared with itself in the other memory format: that is the yardstick.
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

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One training step; ``gradients`` are those of the parameters, in their order."""

    time_s: float
    loss: float
    gradients: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest relative differences of two trainings over all steps: of the loss, and of any parameter's gradient."""

    loss: float
    gradient: float

    @classmethod
    def of(cls, ours: Sequence[Step], theirs: Sequence[Step]) -> Difference:
        pairs = list(zip(theirs, ours, strict=True))
        loss = max(abs(a.loss - b.loss) / abs(a.loss) for a, b in pairs)
        return cls(loss, max(_gradient_difference(a, b) for a, b in pairs))


@dataclass(frozen=True, slots=True)
class TrainingComparison:
    """Steps of mucudnn and of torch from the same seed. ``yardstick``: torch in channels_last against torch."""

    torch_step_s: float
    mucudnn_step_s: float
    losses: tuple[float, ...]
    difference: Difference
    yardstick: Difference

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
    """Every batch is one step of each model; the first step is a warm-up, whose time does not count."""
    channels_last = copy.deepcopy(torch_model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    trainees = [Trainee(model) for model in (torch_model, mucudnn_model, channels_last)]
    steps: list[list[Step]] = [[], [], []]
    for seed, (images, labels) in enumerate(batches):
        for trainee, its_steps in zip(trainees, steps, strict=True):
            its_steps.append(trainee.step(images, labels, seed))
    baseline, ours, yardstick = steps
    return TrainingComparison(
        torch_step_s=_median_s(baseline),
        mucudnn_step_s=_median_s(ours),
        losses=tuple(step.loss for step in ours),
        difference=Difference.of(ours, baseline),
        yardstick=Difference.of(yardstick, baseline),
    )


def _median_s(steps: Sequence[Step]) -> float:
    return median(step.time_s for step in steps[1:])


def _gradient_difference(a: Step, b: Step) -> float:
    """The largest ‖a - b‖ / ‖a‖ of any parameter's gradient."""
    pairs = zip(a.gradients, b.gradients, strict=True)
    return max(float((g - h).norm() / g.norm()) for g, h in pairs)
