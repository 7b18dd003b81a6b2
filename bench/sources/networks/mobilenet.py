"""Networks of inverted residuals: MobileNetV2 and EfficientNet-B0."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import Added, SqueezeExcitation, StochasticDepth, named, normalised

_MOBILENET = (  # (expansion, channels, blocks, stride of the first block), as in table 2 of the paper
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2)),
    *((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)),
)
_EFFICIENTNET = (  # (expansion, filter size, stride of the first block, channels, blocks), as in table 1 of the paper
    *((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3)),
    *((6, 5, 1, 112, 3), (6, 5, 2, 192, 4), (6, 3, 1, 320, 1)),
)
_DROPPED = 0.2  # drop probability of EfficientNet's last block; it grows linearly with depth


def mobilenetv2(num_classes: int) -> nn.Module:
    """Build MobileNetV2 of width 1 (Sandler et al., 2018), with 3,504,872 parameters."""
    features = nn.Sequential(_activated(3, 32, 3, nn.ReLU6, stride=2))
    in_channels = 32
    for expansion, channels, blocks, first_stride in _MOBILENET:
        for index in range(blocks):
            stride = first_stride if index == 0 else 1
            body = _inverted(in_channels, channels, expansion, 3, stride, nn.ReLU6)
            features.append(Added(body) if stride == 1 and in_channels == channels else body)
            in_channels = channels
    features.append(_activated(in_channels, 1280, 1, nn.ReLU6))
    return named(features=features, scores=_scores(num_classes))


def efficientnet_b0(num_classes: int) -> nn.Module:
    """Build EfficientNet-B0 (Tan and Le, 2019), with 5,288,548 parameters."""
    features = nn.Sequential(_activated(3, 32, 3, nn.SiLU, stride=2))
    in_channels, place, total = 32, 0, sum(stage[-1] for stage in _EFFICIENTNET)
    for expansion, size, first_stride, channels, blocks in _EFFICIENTNET:
        for index in range(blocks):
            stride = first_stride if index == 0 else 1
            body = _inverted(in_channels, channels, expansion, size, stride, nn.SiLU, weighs=True)
            if stride == 1 and in_channels == channels:
                body = Added(nn.Sequential(body, StochasticDepth(_DROPPED * place / total)))
            features.append(body)
            in_channels, place = channels, place + 1
    features.append(_activated(in_channels, 1280, 1, nn.SiLU))
    return named(features=features, scores=_scores(num_classes))


def _scores(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, num_classes))


def _inverted(
    in_channels: int,
    channels: int,
    expansion: int,
    size: int,
    stride: int,
    activation: type[nn.Module],
    *,
    weighs: bool = False,
) -> nn.Module:
    """Return the body of an inverted residual block: widen the channels, filter depthwise, narrow the channels.

    weighs: whether squeeze-and-excitation weights the wide channels.
    """
    wide = in_channels * expansion
    body = nn.Sequential(_activated(in_channels, wide, 1, activation)) if expansion > 1 else nn.Sequential()
    body.append(_activated(wide, wide, size, activation, stride=stride, groups=wide))
    if weighs:
        body.append(SqueezeExcitation(wide, in_channels // 4, activation))
    return body.append(normalised(wide, channels, 1))


def _activated(
    in_channels: int, channels: int, size: int, activation: type[nn.Module], *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    convolution = normalised(in_channels, channels, size, stride=stride, padding=size // 2, groups=groups)
    return convolution.append(activation())
