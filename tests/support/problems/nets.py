"""Small models with convolutions, for tests of whole training steps."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import Residual


def conv_net() -> nn.Sequential:
    """Its convolutions are called 0, 3.body.0, 5 and 7."""
    body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), Residual(body, nn.Identity())),
        *(nn.MaxPool2d(2), nn.Conv2d(8, 6, 3, bias=False), nn.Dropout(), nn.Conv2d(6, 6, 1), nn.Flatten()),
    )
