"""Training of a model, step by step, on random images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mucudnn.bench.sources.networks import NETWORKS
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import MemoryFormat
from mucudnn.kernels.memory import format_of
from mucudnn.measuring.operands import input_shape

Batch = tuple[Tensor, Tensor]  # images (N, C, H, W), labels (N,)


class Trainee:
    """A model in training, with its optimizer (stochastic gradient descent with momentum) and the loss."""

    def __init__(self, model: nn.Module, learning_rate: float = 0.01, loss: Loss = F.cross_entropy) -> None:
        self.model = model
        self.loss = loss
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=0.9)
        self._scaler: torch.amp.GradScaler | None = None

    def learn(self, images: Tensor, labels: Tensor, autocast: torch.dtype | None = None) -> Tensor:
        """Run one training step without waiting for the device, and return the loss.

        autocast: dtype for torch's autocast of forward pass and loss, or None.

        In float16 the loss is scaled (``torch.amp.GradScaler``).
        """
        self.optimizer.zero_grad()
        with torch.autocast(images.device.type, autocast, enabled=autocast is not None):
            loss = self.loss(self.model(images), labels)
        if autocast is torch.float16:
            self._scaler = self._scaler or torch.amp.GradScaler(images.device.type)
            self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return loss

    def step(self, images: Tensor, labels: Tensor, autocast: torch.dtype | None = None) -> None:
        """Run one training step as ``learn`` does; gradients are None before and after it."""
        self.learn(images, labels, autocast)
        self.optimizer.zero_grad()


def labelled_batches(
    steps: int, batch_size: int, shape: tuple[int, ...], classes: int = 10, stream: int = 0
) -> Iterator[Batch]:
    """Yield random images with learnable labels: each class is a random pattern, covered by noise.

    stream: seed of the images, but not of the patterns; ranks that train together use different seeds.

    Raises ``InvalidInputError`` for batches of too many elements.

    >>> (images, labels), = labelled_batches(1, batch_size=2, shape=(3, 8, 8))
    >>> tuple(images.shape), tuple(labels.shape)
    ((2, 3, 8, 8), (2,))
    """
    x_shape = input_shape(batch_size, shape)
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(classes, *shape, generator=generator)
    if stream:
        generator = torch.Generator().manual_seed(stream)
    for _ in range(steps):
        labels = torch.randint(classes, (batch_size,), generator=generator)
        yield patterns[labels] + torch.randn(x_shape, generator=generator), labels


def placed(
    batch: Batch, device: str | torch.device, memory_format: MemoryFormat, dtype: torch.dtype | None = None
) -> Batch:
    """Return a batch on a device, with images in a memory format, and in a dtype if one is given."""
    images, labels = batch
    images = images.to(device, dtype).contiguous(memory_format=format_of(memory_format, images.dim()))
    return images, labels.to(device)


Loss = Callable[[Any, Tensor], Tensor]  # of the output of a model, and labels (N,)


Workload = tuple[nn.Module, Batch, Loss]  # a model, with a batch to train it on


def loss_for(source: str) -> Loss:
    """Return the loss of the model that ``source`` names; what classifies nothing, or is a user's, learns zeros."""
    return F.cross_entropy if source in NETWORKS and NETWORKS[source].classifies else mean_square


def mean_square(output: Any, labels: Tensor) -> Tensor:
    """Return the sum of the mean squares of all outputs of a model, a loss for models whose task is unknown."""
    outputs = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
    if not outputs:
        raise InvalidInputError("no output of the model has a gradient, so the model cannot be trained")
    return torch.stack([y.square().mean() for y in outputs]).sum()
