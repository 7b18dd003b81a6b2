"""SqueezeNet 1.1: Iandola et al., 2016, in the authors' later version. 1,235,496 parameters."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import Branches, named


def squeezenet(num_classes: int) -> nn.Module:
    features = nn.Sequential(
        *(nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(), _halve()),
        *(_fire(64, 16, 64), _fire(128, 16, 64), _halve()),
        *(_fire(128, 32, 128), _fire(256, 32, 128), _halve()),
        *(_fire(256, 48, 192), _fire(384, 48, 192), _fire(384, 64, 256), _fire(512, 64, 256)),
    )
    scores = nn.Sequential(
        *(nn.Dropout(), nn.Conv2d(512, num_classes, 1), nn.ReLU()), *(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    )
    return named(features=features, scores=scores)


def _fire(in_channels: int, squeezed: int, expanded: int) -> nn.Module:
    """Few channels by 1x1 filters, then ``expanded`` by 1x1 and as many by 3x3 filters."""
    return nn.Sequential(
        *(nn.Conv2d(in_channels, squeezed, 1), nn.ReLU()),
        Branches(
            nn.Sequential(nn.Conv2d(squeezed, expanded, 1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(squeezed, expanded, 3, padding=1), nn.ReLU()),
        ),
    )


def _halve() -> nn.Module:
    return nn.MaxPool2d(3, stride=2, ceil_mode=True)
