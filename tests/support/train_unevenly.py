"""Training of two ranks with uneven shares, and of one process alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from mucudnn.distributed import UnevenBatchSampler

SHARES, SAMPLES, EPOCHS = (3, 1), 9, 2  # the last batch has one sample: one of the ranks has none of it


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4)).double()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 2, 5, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(4, (SAMPLES,), generator=generator))


def trained_alone() -> list[Tensor]:
    """The same batches, whole: one rank that takes them all."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = UnevenBatchSampler(data(), shares=(sum(SHARES),), rank=0)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data(), batch_sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return [*model.parameters()]


def trained_together() -> list[Tensor]:
    model = DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = UnevenBatchSampler(data(), SHARES)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        with Join([model]):
            for number, (images, labels) in enumerate(DataLoader(data(), batch_sampler=sampler)):
                optimizer.zero_grad()
                (cross_entropy(model(images), labels) * sampler.weight(number)).backward()
                optimizer.step()
    return [*model.parameters()]


def difference(rank: int) -> float:
    """Relative difference between training on two ranks and by one process."""
    together, alone = trained_together(), trained_alone()
    return max(float((a - b).norm() / b.norm()) for a, b in zip(together, alone, strict=True))
