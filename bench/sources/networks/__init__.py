"""Published networks in plain torch: the table of their names, and a file for each family. Imports no torch.

Geometries and numbers of parameters are torchvision's, or the paper's if torchvision lacks the network or deviates.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """A built-in network. factory: takes the number of classes, of which ``num_classes`` is the published number.

    input_shape: (C, H, W) of one image.
    """

    factory: Callable[[int], nn.Module]
    num_classes: int = 1000
    input_shape: tuple[int, int, int] = INPUT_SHAPE


def _loaded(module: str, name: str) -> Callable[[int], nn.Module]:
    """Return a factory that imports its module when called, so that listing networks does not load torch."""

    def factory(num_classes: int) -> nn.Module:
        model: nn.Module = getattr(import_module(f"{__name__}.{module}"), name)(num_classes)
        return model

    return factory


NETWORKS = MappingProxyType(
    {
        "alexnet": Network(_loaded("plain", "alexnet")),
        "vgg16": Network(_loaded("plain", "vgg16")),
        "resnet18": Network(_loaded("residual", "resnet18")),
        "resnet50": Network(_loaded("residual", "resnet50")),
        "googlenet": Network(_loaded("plain", "googlenet")),
        "squeezenet": Network(_loaded("plain", "squeezenet")),
        "mobilenetv2": Network(_loaded("residual", "mobilenetv2")),
        "efficientnet-b0": Network(_loaded("residual", "efficientnet_b0")),
        "convnext-t": Network(_loaded("residual", "convnext_t")),
        "densenet40": Network(_loaded("plain", "densenet40"), 10, (3, 32, 32)),
    }
)


def build(name: str, num_classes: int | None = None) -> nn.Module:
    """Build a built-in network with torch's default initialisation, in training mode.

    num_classes: by default the published number. Raises ``InvalidInputError`` for a name that is not in ``NETWORKS``.

    >>> import torch
    >>> build("resnet18", num_classes=10)(torch.zeros(2, *input_shape_of("resnet18"))).shape
    torch.Size([2, 10])
    """
    network = _find(name)
    return network.factory(network.num_classes if num_classes is None else num_classes)


def input_shape_of(name: str) -> tuple[int, int, int]:
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
