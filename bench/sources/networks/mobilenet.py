"""MobileNetV2: Sandler et al., 2018, width 1. 3,504,872 parameters."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import Added, named, normalised

_STAGES = (  # expansion, channels, blocks, stride of the first: table 2 of the paper
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)


def mobilenetv2(num_classes: int) -> nn.Module:
    features = nn.Sequential(_capped(3, 32, 3, stride=2))
    in_channels = 32
    for expansion, channels, blocks, first_stride in _STAGES:
        for index in range(blocks):
            features.append(_inverted(in_channels, channels, expansion, first_stride if index == 0 else 1))
            in_channels = channels
    features.append(_capped(in_channels, 1280, 1))
    scores = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, num_classes))
    return named(features=features, scores=scores)


def _inverted(in_channels: int, channels: int, expansion: int, stride: int) -> nn.Module:
    """An inverted residual: wide between narrow ends, depthwise in the middle."""
    wide = in_channels * expansion
    body = nn.Sequential(_capped(in_channels, wide, 1)) if expansion > 1 else nn.Sequential()
    body.extend((_capped(wide, wide, 3, stride=stride, groups=wide), normalised(wide, channels, 1)))
    return Added(body) if stride == 1 and in_channels == channels else body


def _capped(in_channels: int, channels: int, size: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return normalised(in_channels, channels, size, stride=stride, padding=size // 2, groups=groups).append(nn.ReLU6())
