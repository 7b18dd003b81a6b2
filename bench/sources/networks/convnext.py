"""ConvNeXt-T (Liu et al., 2022), with 28,589,128 parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mucudnn.bench.sources.networks.blocks import Added, ChannelNorm, StochasticDepth, named

_STAGES = ((96, 3), (192, 3), (384, 9), (768, 3))  # (channels, number of blocks) of each stage
_DROPPED = 0.1  # drop probability of the last block; it grows linearly with depth
_EPSILON = 1e-6


def convnext_t(num_classes: int) -> nn.Module:
    features = nn.Sequential()
    in_channels, place, last = 3, 0, sum(blocks for _, blocks in _STAGES) - 1
    for channels, blocks in _STAGES:
        features.append(_entry(in_channels, channels))
        for _ in range(blocks):
            features.append(Added(nn.Sequential(_Body(channels), StochasticDepth(_DROPPED * place / last))))
            place += 1
        in_channels = channels
    scores = nn.Sequential(
        *(nn.AdaptiveAvgPool2d(1), ChannelNorm(in_channels, eps=_EPSILON)),
        *(nn.Flatten(), nn.Linear(in_channels, num_classes)),
    )
    return named(features=features, scores=scores)


def _entry(in_channels: int, channels: int) -> nn.Module:
    """Return the first module of a stage: it cuts patches in the first stage, and halves the size in the others."""
    if in_channels == 3:
        return nn.Sequential(nn.Conv2d(3, channels, 4, stride=4), ChannelNorm(channels, eps=_EPSILON))
    return nn.Sequential(ChannelNorm(in_channels, eps=_EPSILON), nn.Conv2d(in_channels, channels, 2, stride=2))


class _Body(nn.Module):
    """The body of a ConvNeXt block: depthwise convolution, two linear layers at each pixel, and a scale per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.pointwise = nn.Sequential(
            *(nn.LayerNorm(channels, eps=_EPSILON), nn.Linear(channels, 4 * channels)),
            *(nn.GELU(), nn.Linear(4 * channels, channels)),
        )
        self.scale = nn.Parameter(torch.full((channels,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        pixels: Tensor = self.pointwise(self.depthwise(x).permute(0, 2, 3, 1))
        return (pixels * self.scale).permute(0, 3, 1, 2)
