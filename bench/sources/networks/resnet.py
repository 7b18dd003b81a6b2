"""Networks with bottlenecks and shortcuts: ResNet."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from mucudnn.bench.sources.networks.blocks import Residual, activated, named, normalised


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
        others = (block(channels, channels, 1) for _ in range(count - 1))
        network.add_module(f"stage{index + 1}", nn.Sequential(first, *others))
        in_channels = channels
    return network.extend((nn.AdaptiveAvgPool2d(1), nn.Flatten()))


def _basic_block(in_channels: int, channels: int, stride: int) -> nn.Module:
    body = nn.Sequential(
        activated(in_channels, channels, 3, stride=stride, padding=1), normalised(channels, channels, 3, padding=1)
    )
    return Residual(body, _shortcut(in_channels, channels, stride))


def _bottleneck(in_channels: int, channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    body = nn.Sequential(
        activated(in_channels, narrow, 1),
        activated(narrow, narrow, 3, stride=stride, padding=1),
        normalised(narrow, channels, 1),
    )
    return Residual(body, _shortcut(in_channels, channels, stride))


def _shortcut(in_channels: int, channels: int, stride: int) -> nn.Module:
    same = in_channels == channels and stride == 1
    return nn.Identity() if same else normalised(in_channels, channels, 1, stride=stride)
