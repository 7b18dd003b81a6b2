"""Published networks in plain torch: one file for each kind, and here they are known by name.

What lives here: how each is built, what it reads, and what it is trained for. Geometry and numbers of parameters are
those of torchvision, or of the paper where torchvision has none or another. Nothing is tuned, timed or printed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

from torch import Tensor, nn

from mucudnn.bench.sources.networks.convnext import convnext_t
from mucudnn.bench.sources.networks.diffusion import VAE, UNet
from mucudnn.bench.sources.networks.mobilenet import efficientnet_b0, mobilenetv2
from mucudnn.bench.sources.networks.objectives import (
    CLASSIFICATION,
    DENOISING,
    RECONSTRUCTION,
    SEGMENTATION,
    SMALL_OUTPUTS,
    Objective,
)
from mucudnn.bench.sources.networks.plain import alexnet, densenet40, googlenet, squeezenet, vgg16, vgg19
from mucudnn.bench.sources.networks.resnet import regnety_400mf, resnet18, resnet50
from mucudnn.bench.sources.networks.segformer import SegFormer
from mucudnn.words.errors import InvalidInputError

INPUT_SHAPE = (3, 224, 224)  # of most networks


@dataclass(frozen=True, slots=True)
class Network:
    """A network that is known by name.

    factory: of the number of classes. num_classes: as published; networks without scores ignore it. input_shape: (C, H,
    W) of one image. objective: what it is trained for.
    """

    factory: Callable[[int], nn.Module]
    num_classes: int = 1000
    input_shape: tuple[int, int, int] = INPUT_SHAPE
    objective: Objective = CLASSIFICATION


NETWORKS = MappingProxyType(
    {
        "alexnet": Network(alexnet),
        "vgg16": Network(vgg16),
        "vgg19": Network(vgg19),
        "resnet18": Network(resnet18),
        "resnet50": Network(resnet50),
        "googlenet": Network(googlenet),
        "squeezenet": Network(squeezenet),
        "mobilenetv2": Network(mobilenetv2),
        "efficientnet-b0": Network(efficientnet_b0),
        "convnext-t": Network(convnext_t),
        "regnety-400mf": Network(regnety_400mf),
        "densenet40": Network(densenet40, 10, (3, 32, 32)),
        "segformer-b0": Network(SegFormer, 150, (3, 512, 512), SEGMENTATION),
        "unet": Network(lambda num_classes: UNet(), input_shape=(3, 32, 32), objective=DENOISING),
        "vae": Network(lambda num_classes: VAE(), input_shape=(3, 64, 64), objective=RECONSTRUCTION),
    }
)


def build(name: str, num_classes: int | None = None) -> nn.Module:
    """The network ``name`` with torch's default initialisation, in training mode.

    It reads images, (N, C, H, W), and what ``arguments_for`` adds to them. num_classes: columns of the scores;
    ``None``: as published. The networks without scores ignore it.

    Raises ``InvalidInputError`` for a name that is not in ``NETWORKS``.

    >>> import torch
    >>> build("resnet18", num_classes=10)(torch.zeros(2, *input_shape_of("resnet18"))).shape
    torch.Size([2, 10])
    """
    network = _find(name)
    return network.factory(network.num_classes if num_classes is None else num_classes)


def input_shape_of(name: str) -> tuple[int, int, int]:
    """The (C, H, W) of one image as published. Raises ``InvalidInputError`` as ``build``.

    >>> input_shape_of("densenet40")
    (3, 32, 32)
    """
    return _find(name).input_shape


def arguments_for(source: str, x: Tensor) -> tuple[Tensor, ...]:
    """All that the model of a source is called with, for images x: (N, C, H, W). Models of the user get x alone.

    >>> import torch
    >>> [tuple(argument.shape) for argument in arguments_for("unet", torch.zeros(2, 3, 32, 32))]
    [(2, 3, 32, 32), (2,)]
    """
    return NETWORKS[source].objective.arguments(x) if source in NETWORKS else (x,)


def objective_for(source: str) -> Objective:
    """Objective of the model of a source; models of the user learn to give zeros."""
    return NETWORKS[source].objective if source in NETWORKS else SMALL_OUTPUTS


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the beginning of a sentence that names the nearest name; empty where there is none."""
    close = get_close_matches(name, [*names], n=1)
    return f"did you mean {close[0]}? " if close else ""


def _find(name: str) -> Network:
    if name not in NETWORKS:
        raise InvalidInputError(f"network is {name!r}; {did_you_mean(name, NETWORKS)}allowed are {', '.join(NETWORKS)}")
    return NETWORKS[name]
