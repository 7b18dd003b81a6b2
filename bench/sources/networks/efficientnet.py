"""EfficientNet-B0: Tan and Le, 2019. 5,288,548 parameters."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import Added, SqueezeExcitation, StochasticDepth, named, normalised

_STAGES = (  # expansion, size of the filter, stride of the first block, channels, blocks: table 1 of the paper
    *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
    *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
)
_DROPPED = 0.2  # probability that the last block is dropped; those before it in proportion to their place


def efficientnet_b0(num_classes: int) -> nn.Module:
    features = nn.Sequential(_activated(3, 32, 3, stride=2))
    in_channels, place, total = 32, 0, sum(stage[-1] for stage in _STAGES)
    for expansion, size, first_stride, channels, blocks in _STAGES:
        for index in range(blocks):
            stride = first_stride if index == 0 else 1
            body = _bottleneck(in_channels, channels, expansion, size, stride)
            if stride == 1 and in_channels == channels:
                body = Added(nn.Sequential(body, StochasticDepth(_DROPPED * place / total)))
            features.append(body)
            in_channels, place = channels, place + 1
    features.append(_activated(in_channels, 1280, 1))
    scores = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, num_classes))
    return named(features=features, scores=scores)


def _bottleneck(in_channels: int, channels: int, expansion: int, size: int, stride: int) -> nn.Module:
    """Wide between narrow ends, depthwise in the middle, its channels weighed."""
    wide = in_channels * expansion
    body = nn.Sequential(_activated(in_channels, wide, 1)) if expansion > 1 else nn.Sequential()
    return body.extend(
        (
            _activated(wide, wide, size, stride=stride, groups=wide),
            SqueezeExcitation(wide, in_channels // 4, nn.SiLU),
            normalised(wide, channels, 1),
        )
    )


def _activated(in_channels: int, channels: int, size: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return normalised(in_channels, channels, size, stride=stride, padding=size // 2, groups=groups).append(nn.SiLU())
