"""Ranks that train together by each communication."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mucudnn.bench.suites.data_parallel.benchmark import digest, gathered
from mucudnn.bench.suites.data_parallel.wire import Wire
from mucudnn.words.communication import Communication

PERIOD = 4
STEPS = 2 * PERIOD + 1


def digests(rank: int, communication: Communication) -> list[list[str]]:
    """Train on data of this rank; return the digests of all ranks after each step."""
    torch.manual_seed(rank)  # parameters too: torch sends those of rank 0 to all
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))
    x = torch.randn(8, 16)
    optimizer = Wire(communication, PERIOD).connect(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        found.append(gathered(digest(model)))
    return found
