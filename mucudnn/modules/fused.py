"""A convolution together with what follows it in inference: folded batch norm, an addition, an activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mucudnn.words.errors import InvalidInputError

# Activations by their names; each works in place
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"ReLU": torch.relu_, "ReLU6": partial(F.relu6, inplace=True), "SiLU": partial(F.silu, inplace=True)}
)


class FusedConvolution(nn.Module):
    """Computes activation(convolution(x) + added), the last two in place on what the convolution has just written.

    convolution: with the batch norm, if any, in its filter and bias. batch_norm: the name that this had in the model;
    ``None``: there was none. adds: whether a second input is added. activation: a name of ``ACTIVATIONS``, or ``None``.

    x: (N, C, ...), added: as y or of a shape that torch adds to it, y: (N, K, ...). It is for inference alone: batch
    norm that learns cannot be folded.
    """

    def __init__(self, convolution: nn.Module, *, batch_norm: str | None, adds: bool, activation: str | None) -> None:
        super().__init__()
        self.convolution = convolution
        self.batch_norm, self.adds, self.activation = batch_norm, adds, activation
        self.training = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what is fused with the convolution, for people."""
        parts = self.batch_norm and "batch norm", "addition" if self.adds else None, self.activation
        return tuple(part for part in parts if part is not None)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        y: Tensor = self.convolution(x)
        if added is not None:
            y = y.add_(added) if _takes(y, added) else y + added
        return y if self.activation is None else ACTIVATIONS[self.activation](y)

    def train(self, mode: bool = True) -> Self:
        """Refuse training. Raises ``InvalidInputError``."""
        if mode:
            raise InvalidInputError(
                f"this model has convolutions fused with {', '.join(self.parts)}, and is for inference alone: train "
                "the model that was given to mucudnn.optimize, or optimize it with Config(fuse=False)"
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"fused with {', '.join(self.parts)}"


def _takes(y: Tensor, added: object) -> bool:
    """Tell whether the sum is of y's shape and dtype, and can be written into y."""
    return isinstance(added, Tensor) and added.shape == y.shape and added.dtype == y.dtype
