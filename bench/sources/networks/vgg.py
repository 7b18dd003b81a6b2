"""VGG-16: Simonyan and Zisserman, 2014, configuration D. 138,357,544 parameters."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import named


def vgg16(num_classes: int) -> nn.Module:
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
    return named(features=features, classifier=classifier)
