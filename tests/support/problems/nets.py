"""Small models with convolutions, for tests of whole training steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.bench.sources.networks.blocks import Residual


def conv_net() -> nn.Sequential:
    """Its convolutions are called 0, 3.body.0, 5 and 7."""
    body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(body, nn.Identity())),
        *(nn.MaxPool2d(2), nn.Conv2d(8, 6, 3, bias=False), nn.Dropout(), nn.Conv2d(6, 6, 1), nn.Flatten()),
    )


def two_convolutions(r: int = 1) -> nn.Sequential:
    """From 3 channels to 8 and, by filters of r x r, to 4."""
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, r))


class DataDependent(nn.Module):
    """What it computes depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.count = self.count + 1
        y = self.body(x)
        return y * 2 if y.sum().item() > 0 else y
