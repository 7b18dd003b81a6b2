"""Five published networks in plain torch, with geometry and parameter counts as in torchvision.

AlexNet: Krizhevsky, 2014 (one tower). VGG-16: Simonyan and Zisserman, 2014, configuration D. GoogLeNet: Szegedy et al.,
2014, with batch normalisation and without the auxiliary heads; it has 3x3 filters where the paper has 5x5, as in
torchvision and its weights. ResNet-18 and -50: He et al., 2015, a bottleneck's stride on its 3x3 filter.

All read images x: (N, 3, 224, 224) and give scores (N, num_classes).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from difflib import get_close_matches
from types import MappingProxyType

import torch
from torch import Tensor, nn

from mucudnn.words.errors import InvalidInputError

INPUT_SHAPE = (3, 224, 224)


def build(name: str, num_classes: int = 1000) -> nn.Module:
    """The network ``name`` with torch's default initialisation, in training mode.

    Raises ``InvalidInputError`` for a name that is not in ``NETWORKS``.

    >>> build("resnet18", num_classes=10)(torch.zeros(2, *INPUT_SHAPE)).shape
    torch.Size([2, 10])
    """
    if name not in NETWORKS:
        close = get_close_matches(name, NETWORKS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InvalidInputError(f"network is {name!r}; {hint}allowed are {', '.join(NETWORKS)}")
    return NETWORKS[name](num_classes)


class Residual(nn.Module):
    """Computes relu(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class Branches(nn.Module):
    """Concatenates what the branches make of the same x, along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _alexnet(num_classes: int) -> nn.Module:
    features = nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, stride=2)),
    )
    classifier = nn.Sequential(
        *(nn.AdaptiveAvgPool2d(6), nn.Flatten(), nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU()),
        *(nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, num_classes)),
    )
    return _named(features=features, classifier=classifier)


def _vgg16(num_classes: int) -> nn.Module:
    features = nn.Sequential()
    in_channels = 3
    for channels, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            features.extend((nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU()))
            in_channels = channels
        features.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        *(nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout()),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, num_classes)),
    )
    return _named(features=features, classifier=classifier)


def _resnet(block: Callable[[int, int, int], nn.Module], repeats: tuple[int, ...], width: int) -> nn.Sequential:
    """Stem and stages of ``repeats`` blocks each. width: output channels of the first stage, doubled in each."""
    network = _named(stem=_activated(3, 64, 7, stride=2, padding=3), pool=nn.MaxPool2d(3, 2, 1))
    in_channels = 64
    for index, count in enumerate(repeats):
        channels = width * 2**index
        first = block(in_channels, channels, 1 if index == 0 else 2)
        others = (block(channels, channels, 1) for _ in range(count - 1))
        network.add_module(f"stage{index + 1}", nn.Sequential(first, *others))
        in_channels = channels
    return network.extend((nn.AdaptiveAvgPool2d(1), nn.Flatten()))


def _resnet18(num_classes: int) -> nn.Module:
    return _resnet(_basic_block, (2, 2, 2, 2), width=64).append(nn.Linear(512, num_classes))


def _resnet50(num_classes: int) -> nn.Module:
    return _resnet(_bottleneck, (3, 4, 6, 3), width=256).append(nn.Linear(2048, num_classes))


def _basic_block(in_channels: int, channels: int, stride: int) -> nn.Module:
    body = nn.Sequential(
        _activated(in_channels, channels, 3, stride=stride, padding=1), _normalised(channels, channels, 3, padding=1)
    )
    return Residual(body, _shortcut(in_channels, channels, stride))


def _bottleneck(in_channels: int, channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    body = nn.Sequential(
        _activated(in_channels, narrow, 1),
        _activated(narrow, narrow, 3, stride=stride, padding=1),
        _normalised(narrow, channels, 1),
    )
    return Residual(body, _shortcut(in_channels, channels, stride))


def _shortcut(in_channels: int, channels: int, stride: int) -> nn.Module:
    same = in_channels == channels and stride == 1
    return nn.Identity() if same else _normalised(in_channels, channels, 1, stride=stride)


def _googlenet(num_classes: int) -> nn.Module:
    return _named(
        conv1=_activated(3, 64, 7, stride=2, padding=3).append(_halve(3)),
        conv2=_activated(64, 64, 1),
        conv3=_activated(64, 192, 3, padding=1).append(_halve(3)),
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
            _activated(in_channels, ones, 1),
            nn.Sequential(_activated(in_channels, reduce3, 1), _activated(reduce3, threes, 3, padding=1)),
            nn.Sequential(_activated(in_channels, reduce5, 1), _activated(reduce5, fives, 3, padding=1)),
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), _activated(in_channels, pooled, 1)),
        )
    )


def _halve(size: int) -> nn.Module:
    return nn.MaxPool2d(size, stride=2, ceil_mode=True)


def _normalised(in_channels: int, channels: int, size: int, *, stride: int = 1, padding: int = 0) -> nn.Sequential:
    convolution = nn.Conv2d(in_channels, channels, size, stride=stride, padding=padding, bias=False)
    return _named(conv=convolution, norm=nn.BatchNorm2d(channels))


def _activated(in_channels: int, channels: int, size: int, *, stride: int = 1, padding: int = 0) -> nn.Sequential:
    return _normalised(in_channels, channels, size, stride=stride, padding=padding).append(nn.ReLU())


def _named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


NETWORKS = MappingProxyType(
    {"alexnet": _alexnet, "vgg16": _vgg16, "resnet18": _resnet18, "resnet50": _resnet50, "googlenet": _googlenet}
)
