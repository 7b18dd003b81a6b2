"""The epilogue of a convolution: what inference computes of y next, so that it can be done where y is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

# Activations by their names; each works in place
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"ReLU": torch.relu_, "ReLU6": partial(F.relu6, inplace=True), "SiLU": partial(F.silu, inplace=True)}
)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """activation(y + added), after the bias.

    activation: a name of ``ACTIVATIONS``; ``None``: y + added itself. added: (N, K, P, Q), y's dtype; or ``None``.
    """

    activation: str | None = None
    added: Tensor | None = None

    def of(self, samples: slice) -> Epilogue:
        """Take that of some samples of y."""
        if self.added is None or samples.stop - samples.start == len(self.added):
            return self
        return Epilogue(self.activation, self.added[samples])

    def apply(self, y: Tensor) -> Tensor:
        """Compute it in place, by torch. Returns y."""
        if self.added is not None:
            y = y.add_(self.added)
        return y if self.activation is None else ACTIVATIONS[self.activation](y)
