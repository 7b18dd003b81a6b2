"""Published networks in plain torch: the table of their names, and a file for each family. Imports no torch.

Geometries and numbers of parameters are torchvision's, or the paper's if torchvision lacks the network or deviates.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import did_you_mean

if TYPE_CHECKING:
    from torch import nn

INPUT_SHAPE = (3, 224, 224)  # shape of most networks' images


@dataclass(frozen=True, slots=True)
class Network:
    """A built-in network: the file of its function, which has the network's name with ``_`` for ``-``.

    num_classes: the published number.
    input_shape: (C, H, W) of one image.
    """

    file: str
    num_classes: int = 1000
    input_shape: tuple[int, ...] = INPUT_SHAPE


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
    }
)


def build(name: str, num_classes: int | None = None) -> nn.Module:
    """Build a built-in network with torch's default initialisation, in training mode.

    num_classes: by default the published number.

    Raises ``InvalidInputError`` for a name that is not in ``NETWORKS``.

    >>> import torch
    >>> build("resnet18", num_classes=10)(torch.zeros(2, *input_shape_of("resnet18"))).shape
    torch.Size([2, 10])
    """
    network = _find(name)
    file = import_module(f"{__name__}.{network.file}")  # when needed, so that listing networks does not load torch
    model: nn.Module = getattr(file, name.replace("-", "_"))(num_classes or network.num_classes)
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
