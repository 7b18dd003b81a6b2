"""The epilogue of a convolution in inference: an addition and an activation that can be fused into writing y."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

# Activations by name; each works in place.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"ReLU": torch.relu_, "ReLU6": partial(F.relu6, inplace=True), "SiLU": partial(F.silu, inplace=True)}
)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The computation activation(y + added) on the output y of a convolution, after the bias.

    activation: a name in ``ACTIVATIONS``, or None. added: (N, K, P, Q), in y's dtype, None for no addition.
    """

    activation: str | None = None
    added: Tensor | None = None

    def apply(self, y: Tensor) -> Tensor:
        """Apply the addition and the activation to y in place with torch operators, and return y."""
        if self.added is not None:
            y = y.add_(self.added)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)
