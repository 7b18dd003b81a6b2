"""Networks of residual blocks: ResNet, MobileNetV2, EfficientNet-B0 and ConvNeXt-T."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mucudnn.bench.sources.networks.blocks import (
    Added,
    ChannelNorm,
    Residual,
    SqueezeExcitation,
    StochasticDepth,
    activated,
    named,
    normalised,
)


def resnet18(num_classes: int) -> nn.Module:
    """Build ResNet-18 (He et al., 2015), with 11,689,512 parameters."""
    return _resnet(_basic_block, (2, 2, 2, 2), width=64).append(nn.Linear(512, num_classes))


def resnet50(num_classes: int) -> nn.Module:
    """Build ResNet-50 (He et al., 2015), with 25,557,032 parameters; the stride of bottlenecks is at the 3x3 filter."""
    return _resnet(_bottleneck, (3, 4, 6, 3), width=256).append(nn.Linear(2048, num_classes))


def _resnet(block: Callable[[int, int, int], nn.Module], repeats: tuple[int, ...], width: int) -> nn.Sequential:
    """Build a ResNet with ``repeats`` blocks in each stage.

    width: output channels of the first stage; each further stage doubles them.
    """
    network = named(stem=activated(3, 64, 7, stride=2, padding=3), pool=nn.MaxPool2d(3, 2, 1))
    in_channels = 64
    for index, count in enumerate(repeats):
        channels = width * 2**index
        first = block(in_channels, channels, 1 if index == 0 else 2)
        repeated = (block(channels, channels, 1) for _ in range(count - 1))
        network.add_module(f"stage{index + 1}", nn.Sequential(first, *repeated))
        in_channels = channels
    return network.extend((nn.AdaptiveAvgPool2d(1), nn.Flatten()))


def _basic_block(in_channels: int, channels: int, stride: int) -> nn.Module:
    return Residual(
        body=nn.Sequential(
            activated(in_channels, channels, 3, stride=stride, padding=1), normalised(channels, channels, 3, padding=1)
        ),
        shortcut=_shortcut(in_channels, channels, stride),
    )


def _bottleneck(in_channels: int, channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return Residual(
        body=nn.Sequential(
            activated(in_channels, narrow, 1),
            activated(narrow, narrow, 3, stride=stride, padding=1),
            normalised(narrow, channels, 1),
        ),
        shortcut=_shortcut(in_channels, channels, stride),
    )


def _shortcut(in_channels: int, channels: int, stride: int) -> nn.Module:
    if in_channels == channels and stride == 1:
        return nn.Identity()
    return normalised(in_channels, channels, 1, stride=stride)


# (expansion, filter size, stride of the first block, channels, blocks) of each stage: table 2 of MobileNetV2's paper,
# and table 1 of EfficientNet's.
_MOBILENET = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 3, 2, 32, 3),
    (6, 3, 2, 64, 4),
    (6, 3, 1, 96, 3),
    (6, 3, 2, 160, 3),
    (6, 3, 1, 320, 1),
)
_EFFICIENTNET = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
_Stages = tuple[tuple[int, int, int, int, int], ...]


def mobilenetv2(num_classes: int) -> nn.Module:
    """Build MobileNetV2 of width 1 (Sandler et al., 2018), with 3,504,872 parameters."""
    return _inverted_network(num_classes, _MOBILENET, nn.ReLU6)


def efficientnet_b0(num_classes: int) -> nn.Module:
    """Build EfficientNet-B0 (Tan and Le, 2019), with 5,288,548 parameters."""
    return _inverted_network(num_classes, _EFFICIENTNET, nn.SiLU, weighs=True, dropped=0.2)


def _inverted_network(
    num_classes: int, stages: _Stages, activation: type[nn.Module], *, weighs: bool = False, dropped: float = 0.0
) -> nn.Module:
    """Return a network of inverted residual blocks.

    dropped: drop probability of the last block; it grows linearly with depth.
    """
    features = nn.Sequential(_activated(3, 32, 3, activation, stride=2))
    in_channels, place, total = 32, 0, sum(stage[-1] for stage in stages)
    for expansion, size, first_stride, channels, blocks in stages:
        for index in range(blocks):
            stride = first_stride if index == 0 else 1
            block = _inverted(in_channels, channels, expansion, size, stride, activation, weighs=weighs)
            if stride == 1 and in_channels == channels:
                block = Added(nn.Sequential(block, StochasticDepth(dropped * place / total)) if dropped else block)
            features.append(block)
            in_channels, place = channels, place + 1
    features.append(_activated(in_channels, 1280, 1, activation))
    return named(
        features=features,
        scores=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, num_classes)),
    )


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
    return normalised(in_channels, channels, size, stride=stride, padding=size // 2, groups=groups).append(activation())


_CONVNEXT = ((96, 3), (192, 3), (384, 9), (768, 3))  # (channels, number of blocks) of each stage
_MOST_DROPPED = 0.1  # drop probability of the last block; it grows linearly with depth
_EPSILON = 1e-6


def convnext_t(num_classes: int) -> nn.Module:
    features = nn.Sequential()
    in_channels, place, last = 3, 0, sum(blocks for _, blocks in _CONVNEXT) - 1
    for channels, blocks in _CONVNEXT:
        if in_channels == 3:  # The first stage cuts patches, and the others halve the size.
            entry = nn.Sequential(nn.Conv2d(3, channels, 4, stride=4), ChannelNorm(channels, eps=_EPSILON))
        else:
            entry = nn.Sequential(ChannelNorm(in_channels, eps=_EPSILON), nn.Conv2d(in_channels, channels, 2, stride=2))
        features.append(entry)
        for _ in range(blocks):
            features.append(Added(nn.Sequential(_Body(channels), StochasticDepth(_MOST_DROPPED * place / last))))
            place += 1
        in_channels = channels
    return named(
        features=features,
        scores=nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            ChannelNorm(in_channels, eps=_EPSILON),
            nn.Flatten(),
            nn.Linear(in_channels, num_classes),
        ),
    )


class _Body(nn.Module):
    """The body of a ConvNeXt block: depthwise convolution, two linear layers at each pixel, and a scale per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.pointwise = nn.Sequential(
            nn.LayerNorm(channels, eps=_EPSILON),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
        )
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        pixels = self.pointwise(self.depthwise(x).permute(0, 2, 3, 1))
        return torch.mul(pixels, self.scale).permute(0, 3, 1, 2)
