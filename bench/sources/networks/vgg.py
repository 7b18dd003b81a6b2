"""VGG-16 and -19: Simonyan and Zisserman, 2014, configurations D and E. 138,357,544 and 143,667,240 parameters."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import named

_WIDTHS = (64, 128, 256, 512, 512)


def vgg16(num_classes: int) -> nn.Module:
    return _vgg((2, 2, 3, 3, 3), num_classes)


def vgg19(num_classes: int) -> nn.Module:
    return _vgg((2, 2, 4, 4, 4), num_classes)


def _vgg(repeats: tuple[int, ...], num_classes: int) -> nn.Module:
    """Stages of ``repeats`` convolutions each, then the classifier."""
    features = nn.Sequential()
    in_channels = 3
    for channels, count in zip(_WIDTHS, repeats, strict=True):
        for _ in range(count):
            features.extend((nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU()))
            in_channels = channels
        features.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        *(nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout()),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, num_classes)),
    )
    return named(features=features, classifier=classifier)
