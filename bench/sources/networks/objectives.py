"""Training objectives: the loss, and how to make a network's arguments and targets from images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mucudnn.words.errors import InvalidInputError

_TIMES = 1000  # number of diffusion steps
_KL_WEIGHT = 1e-6  # the weight in latent diffusion


@dataclass(frozen=True, slots=True)
class Objective:
    """A training objective for images x, (N, C, H, W), with labels, (N,).

    arguments: makes the network's arguments from x. target: makes the target from x and labels. loss: computes a scalar
    from the network's output and the target.
    """

    arguments: Callable[[Tensor], tuple[Tensor, ...]]
    target: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[Any, Tensor], Tensor]


def _images(x: Tensor) -> tuple[Tensor]:
    return (x,)


def _images_and_times(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and one random time step per image. The time steps depend only on the number of images."""
    generator = torch.Generator().manual_seed(0)
    return x, torch.randint(_TIMES, (len(x),), generator=generator).to(x.device)


def _label_of_image(x: Tensor, labels: Tensor) -> Tensor:
    return labels


def _label_of_pixels(x: Tensor, labels: Tensor) -> Tensor:
    return labels[:, None, None].expand(-1, *x.shape[2:]).contiguous()


def _noise(x: Tensor, labels: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)


def _image(x: Tensor, labels: Tensor) -> Tensor:
    return x


def _segmentation_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy over pixels, after scaling scores, (N, classes, h, w), up to the labels' size."""
    return F.cross_entropy(F.interpolate(scores, labels.shape[1:], mode="bilinear", align_corners=False), labels)


def _reconstruction_loss(output: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """Return the loss of an autoencoder: squared error of the image plus weighted KL divergence of the latent.

    The divergence is that from a standard normal distribution.
    """
    decoded, mean, log_variance = output
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum() / len(x)
    return F.mse_loss(decoded, x) + _KL_WEIGHT * divergence


def _mean_square(output: Any, target: Tensor) -> Tensor:
    """Return the sum of the mean squares of all outputs of a model, a loss for models whose task is unknown."""
    outputs = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
    if not outputs:
        raise InvalidInputError("no output of the model has a gradient, so the model cannot be trained")
    return torch.stack([y.square().mean() for y in outputs]).sum()


CLASSIFICATION = Objective(_images, _label_of_image, F.cross_entropy)
SEGMENTATION = Objective(_images, _label_of_pixels, _segmentation_loss)
DENOISING = Objective(_images_and_times, _noise, F.mse_loss)
RECONSTRUCTION = Objective(_images, _image, _reconstruction_loss)
SMALL_OUTPUTS = Objective(_images, _label_of_image, _mean_square)
