"""Published networks: the table of their names, and a file for each family. Imports no torch.

Most are in plain torch, with torchvision's geometries and numbers of parameters, or the paper's if torchvision lacks
the network or deviates. Others are built by the packages that have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING

from mucudnn.core.errors import InvalidInputError, UnavailableError, first_line
from mucudnn.core.values import did_you_mean

if TYPE_CHECKING:
    from torch import nn

INPUT_SHAPE = (3, 224, 224)  # shape of most networks' images


@dataclass(frozen=True, slots=True)
class Network:
    """A built-in network: the file of its function, which has the network's name with ``_`` for ``-``.

    num_classes: the published number.
    input_shape: (C, H, W) of one image, (C, D, H, W) of one volume, or (C, L) of one sequence.
    package: the package that builds it; empty for a network in plain torch.
    classifies: whether its output is a score of each class.
    """

    file: str
    num_classes: int = 1000
    input_shape: tuple[int, ...] = INPUT_SHAPE
    package: str = ""
    classifies: bool = True


NETWORKS = MappingProxyType(
    {
        "alexnet": Network("plain"),
        "vgg16": Network("plain"),
        "resnet18": Network("residual"),
        "resnet50": Network("residual"),
        "googlenet": Network("plain"),
        "squeezenet": Network("plain"),
        "mobilenetv2": Network("residual"),
        "efficientnet-b0": Network("residual"),
        "convnext-t": Network("residual"),
        "densenet40": Network("plain", 10, (3, 32, 32)),
        "unet-groupnorm": Network("large_images", 2, (3, 256, 256), classifies=False),
        "conv-tasnet": Network("sequences", 2, (1, 8000), classifies=False),
        "seresnet18": Network("packages", package="timm"),
        "densenet121": Network("packages", package="timm"),
        "efficientnetv2-b0": Network("packages", 1000, (3, 192, 192), "timm"),
        "mobilenetv4-small": Network("packages", package="timm"),
        "repvit-m0-9": Network("packages", package="timm"),
        "yolo11n": Network("packages", 80, (3, 256, 256), "ultralytics", classifies=False),
        "unet-resnet18": Network("packages", 1, (3, 192, 192), "segmentation_models_pytorch", classifies=False),
        "monai-unet": Network("packages", 2, (1, 64, 96, 96), "monai", classifies=False),
        "diffusers-unet2d": Network("packages", 3, (3, 64, 64), "diffusers", classifies=False),
        "r3d-18": Network("packages", 400, (3, 8, 112, 112), "torchvision"),
    }
)


def build(name: str, num_classes: int | None = None) -> nn.Module:
    """Build a built-in network with torch's default initialisation, in training mode.

    num_classes: by default the published number.

    Raises ``InvalidInputError`` for a name that is not in ``NETWORKS``, and ``UnavailableError`` if the network's
    package is not installed or cannot build it.

    >>> import torch
    >>> build("resnet18", num_classes=10)(torch.zeros(2, *input_shape_of("resnet18"))).shape
    torch.Size([2, 10])
    """
    network = _find(name)
    if network.package and find_spec(network.package) is None:
        raise UnavailableError(
            f"{name} is a network of {network.package}, which is not installed: pip install {network.package}"
        )
    file = import_module(f"{__name__}.{network.file}")  # when needed, so that listing networks does not load torch
    try:
        model: nn.Module = getattr(file, name.replace("-", "_"))(num_classes or network.num_classes)
    except Exception as error:
        if not network.package:
            raise
        # The package may need others, or another version of torch.
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UnavailableError(f"{name} is a network of {network.package}, which cannot build it: {reason}") from error
    return model


def input_shape_of(name: str) -> tuple[int, ...]:
    """Return the shape (C, H, W) of one image that a network was published for.

    Raises ``InvalidInputError`` for a name that is not in ``NETWORKS``.

    >>> input_shape_of("densenet40")
    (3, 32, 32)
    """
    return _find(name).input_shape


def _find(name: str) -> Network:
    if name not in NETWORKS:
        raise InvalidInputError(f"network is {name!r}; {did_you_mean(name, NETWORKS)}allowed are {', '.join(NETWORKS)}")
    return NETWORKS[name]
