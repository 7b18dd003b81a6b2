"""GoogLeNet: Szegedy et al., 2014, with batch normalisation and without the auxiliary heads. 7,005,832 parameters.

It has the paper's 5x5 filters. Torchvision and its weights have 3x3 there, by a mistake that is known.
"""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import Branches, activated, named


def googlenet(num_classes: int) -> nn.Module:
    return named(
        conv1=activated(3, 64, 7, stride=2, padding=3).append(_halve(3)),
        conv2=activated(64, 64, 1),
        conv3=activated(64, 192, 3, padding=1).append(_halve(3)),
        inception3a=_inception(192, 64, 96, 128, 16, 32, 32),
        inception3b=_inception(256, 128, 128, 192, 32, 96, 64).append(_halve(3)),
        inception4a=_inception(480, 192, 96, 208, 16, 48, 64),
        inception4b=_inception(512, 160, 112, 224, 24, 64, 64),
        inception4c=_inception(512, 128, 128, 256, 24, 64, 64),
        inception4d=_inception(512, 112, 144, 288, 32, 64, 64),
        inception4e=_inception(528, 256, 160, 320, 32, 128, 128).append(_halve(2)),
        inception5a=_inception(832, 256, 160, 320, 32, 128, 128),
        inception5b=_inception(832, 384, 192, 384, 48, 128, 128),
        scores=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, num_classes)),
    )


def _inception(
    in_channels: int, ones: int, reduce3: int, threes: int, reduce5: int, fives: int, pooled: int
) -> nn.Sequential:
    """One module of table 1 of the paper. The arguments are the table's columns."""
    return nn.Sequential(
        Branches(
            activated(in_channels, ones, 1),
            nn.Sequential(activated(in_channels, reduce3, 1), activated(reduce3, threes, 3, padding=1)),
            nn.Sequential(activated(in_channels, reduce5, 1), activated(reduce5, fives, 5, padding=2)),
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), activated(in_channels, pooled, 1)),
        )
    )


def _halve(size: int) -> nn.Module:
    return nn.MaxPool2d(size, stride=2, ceil_mode=True)
