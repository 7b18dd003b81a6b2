"""Networks without residuals: AlexNet, VGG, SqueezeNet, GoogLeNet and DenseNet."""

from __future__ import annotations

from torch import nn

from mucudnn.bench.sources.networks.blocks import Branches, activated, named


def alexnet(num_classes: int) -> nn.Module:
    """Build the one-tower AlexNet (Krizhevsky, 2014), with 61,100,840 parameters."""
    return named(
        features=nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        ),
        classifier=nn.Sequential(
            nn.AdaptiveAvgPool2d(6),
            nn.Flatten(),
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, num_classes),
        ),
    )


_VGG_STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # (channels, number of convolutions) of each stage


def vgg16(num_classes: int) -> nn.Module:
    """Build VGG-16 (Simonyan and Zisserman, 2014, configuration D), with 138,357,544 parameters."""
    features = nn.Sequential()
    in_channels = 3
    for channels, count in _VGG_STAGES:
        for _ in range(count):
            features.extend((nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU()))
            in_channels = channels
        features.append(nn.MaxPool2d(2))
    return named(
        features=features,
        classifier=nn.Sequential(
            nn.AdaptiveAvgPool2d(7),
            nn.Flatten(),
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, num_classes),
        ),
    )


def squeezenet(num_classes: int) -> nn.Module:
    """Build SqueezeNet 1.1, the later version by Iandola et al. (2016), with 1,235,496 parameters."""
    return named(
        features=nn.Sequential(
            nn.Conv2d(3, 64, 3, stride=2),
            nn.ReLU(),
            _halve(3),
            _fire(64, 16, 64),
            _fire(128, 16, 64),
            _halve(3),
            _fire(128, 32, 128),
            _fire(256, 32, 128),
            _halve(3),
            _fire(256, 48, 192),
            _fire(384, 48, 192),
            _fire(384, 64, 256),
            _fire(512, 64, 256),
        ),
        scores=nn.Sequential(
            nn.Dropout(), nn.Conv2d(512, num_classes, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
    )


def _fire(in_channels: int, squeezed: int, expanded: int) -> nn.Module:
    """Return a fire module: 1x1 filters to ``squeezed`` channels, then ``expanded`` each of 1x1 and of 3x3 filters."""
    return nn.Sequential(
        nn.Conv2d(in_channels, squeezed, 1),
        nn.ReLU(),
        Branches(
            nn.Sequential(nn.Conv2d(squeezed, expanded, 1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(squeezed, expanded, 3, padding=1), nn.ReLU()),
        ),
    )


def _halve(size: int) -> nn.Module:
    return nn.MaxPool2d(size, stride=2, ceil_mode=True)


def googlenet(num_classes: int) -> nn.Module:
    """Build GoogLeNet (Szegedy et al., 2014) with batch norm and without auxiliary heads: 7,005,832 parameters.

    The network has the paper's 5x5 filters, which torchvision replaces with 3x3 filters by a known mistake.
    """
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
    """Return an inception module of GoogLeNet. The arguments are the columns of table 1 of the paper."""
    return nn.Sequential(
        Branches(
            activated(in_channels, ones, 1),
            nn.Sequential(activated(in_channels, reduce3, 1), activated(reduce3, threes, 3, padding=1)),
            nn.Sequential(activated(in_channels, reduce5, 1), activated(reduce5, fives, 5, padding=2)),
            nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), activated(in_channels, pooled, 1)),
        )
    )


_DENSENET_GROWTH = 12
_DENSENET_LAYERS = 12  # number of layers per block


def densenet40(num_classes: int) -> nn.Module:
    """Build DenseNet-40 for CIFAR (Huang et al., 2017), growth 12, without bottlenecks: 1.0 million parameters."""
    features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False))
    channels = 16
    for block in range(3):
        if block > 0:
            features.extend((_preactivated(channels, channels, 1), nn.AvgPool2d(2)))
        for _ in range(_DENSENET_LAYERS):
            features.append(Branches(nn.Identity(), _preactivated(channels, _DENSENET_GROWTH, 3)))
            channels += _DENSENET_GROWTH
    features.extend((nn.BatchNorm2d(channels), nn.ReLU()))
    return named(
        features=features, scores=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))
    )


def _preactivated(in_channels: int, channels: int, size: int) -> nn.Module:
    """Return a convolution preceded by batch norm and ReLU."""
    return nn.Sequential(
        nn.BatchNorm2d(in_channels),
        nn.ReLU(),
        nn.Conv2d(in_channels, channels, size, padding=size // 2, bias=False),
    )
