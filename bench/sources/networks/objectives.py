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


def _label_of_image(x: Tensor, labels: Tensor) -> Tensor:
    return labels


def _mean_square(output: Any, target: Tensor) -> Tensor:
    """Return the sum of the mean squares of all outputs of a model, a loss for models whose task is unknown."""
    outputs = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
    if not outputs:
        raise InvalidInputError("no output of the model has a gradient, so the model cannot be trained")
    return torch.stack([y.square().mean() for y in outputs]).sum()


CLASSIFICATION = Objective(_images, _label_of_image, F.cross_entropy)
SMALL_OUTPUTS = Objective(_images, _label_of_image, _mean_square)
