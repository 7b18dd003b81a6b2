"""DenseNet-40 with growth 12, for images of CIFAR: Huang et al., 2017, without bottlenecks. 1.0 million parameters."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import Branches, named

_GROWTH = 12
_LAYERS = 12  # of each of the three blocks


def densenet40(num_classes: int) -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False))
    channels = 16
    for block in range(3):
        if block > 0:
            features.extend((_preactivated(channels, channels, 1), nn.AvgPool2d(2)))
        for _ in range(_LAYERS):
            features.append(Branches(nn.Identity(), _preactivated(channels, _GROWTH, 3)))
            channels += _GROWTH
    features.extend((nn.BatchNorm2d(channels), nn.ReLU()))
    scores = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    return named(features=features, scores=scores)


def _preactivated(in_channels: int, channels: int, size: int) -> nn.Module:
    """Batch norm and ReLU before the convolution."""
    convolution = nn.Conv2d(in_channels, channels, size, padding=size // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(in_channels), nn.ReLU(), convolution)
