"""RegNetY-400MF: Radosavovic et al., 2020. 4,344,144 parameters."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import Residual, SqueezeExcitation, activated, named, normalised

_STAGES = ((48, 1), (104, 3), (208, 6), (440, 6))  # channels, blocks
_GROUP = 8  # channels of a group


def regnety_400mf(num_classes: int) -> nn.Module:
    network = named(stem=activated(3, 32, 3, stride=2, padding=1))
    in_channels = 32
    for stage, (channels, blocks) in enumerate(_STAGES):
        body = nn.Sequential()
        for index in range(blocks):
            body.append(_block(in_channels, channels, 2 if index == 0 else 1))
            in_channels = channels
        network.add_module(f"stage{stage + 1}", body)
    return network.extend((nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(in_channels, num_classes)))


def _block(in_channels: int, channels: int, stride: int) -> nn.Module:
    """A bottleneck as wide as its ends, in groups, its channels weighed."""
    body = nn.Sequential(
        activated(in_channels, channels, 1),
        activated(channels, channels, 3, stride=stride, padding=1, groups=channels // _GROUP),
        SqueezeExcitation(channels, round(in_channels / 4), nn.ReLU),
        normalised(channels, channels, 1),
    )
    same = in_channels == channels and stride == 1
    return Residual(body, nn.Identity() if same else normalised(in_channels, channels, 1, stride=stride))
