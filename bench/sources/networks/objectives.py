"""What models are trained to minimize: networks the errors of their classes, and a user's own model its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mucudnn.bench.sources.networks import NETWORKS
from mucudnn.core.errors import InvalidInputError

Loss = Callable[[Any, Tensor], Tensor]  # of the output of a model, and labels (N,)


def loss_for(source: str) -> Loss:
    """Return the loss of the model that ``source`` names; a user's own model learns to return zeros."""
    return F.cross_entropy if source in NETWORKS else mean_square


def mean_square(output: Any, labels: Tensor) -> Tensor:
    """Return the sum of the mean squares of all outputs of a model, a loss for models whose task is unknown."""
    outputs = [y for y in tree_leaves(output) if isinstance(y, Tensor) and y.requires_grad]
    if not outputs:
        raise InvalidInputError("no output of the model has a gradient, so the model cannot be trained")
    return torch.stack([y.square().mean() for y in outputs]).sum()
