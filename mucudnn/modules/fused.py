"""A convolution fused with the operations after it, for inference: folded batch norm, an addition, an activation."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mucudnn.kernels.compiled.stages import activation_number
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.modules.conv2d import Conv2d
from mucudnn.running.eager import hot_path
from mucudnn.running.hooks import has_hooks
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import ADDITION, WithEpilogue

run_fused = hot_path.fused  # ``optimizing/in_place.py`` replaces it while it records


class FusedConvolution(nn.Module):
    """Module that computes activation(convolution(x) + added), in one algorithm if the tuned one supports that.

    Otherwise addition and activation are computed in place on the result of the convolution.

    convolution: the convolution module, with the batch norm, if any, folded into its filter and bias. batch_norm: name
    of the batch norm in the model, or None if there was none. adds: whether a second input is added. activation: a name
    in ``ACTIVATIONS``, or None.

    x: (N, C, ...), added: broadcastable to y, y: (N, K, ...). For inference only, since batch norm in training mode
    cannot be folded.
    """

    def __init__(self, convolution: nn.Module, *, batch_norm: str | None, adds: bool, activation: str | None) -> None:
        super().__init__()
        self.convolution = convolution
        self.batch_norm, self.adds, self.activation = batch_norm, adds, activation
        self.training = False

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the operations fused with the convolution: batch norm, addition, activation."""
        parts = self.batch_norm and "batch norm", ADDITION if self.adds else None, self.activation
        return tuple(part for part in parts if part is not None)

    @property
    def epilogue(self) -> WithEpilogue | None:
        """Addition and activation after the convolution, which an algorithm may compute with y, or None."""
        if not isinstance(self.convolution, nn.Conv2d) or not (self.adds or self.activation):
            return None
        return WithEpilogue(self.activation, self.adds)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        convolution = self._modules["convolution"]  # faster than the attribute
        assert convolution is not None
        if isinstance(convolution, Conv2d) and _is_called_as_it_stands(convolution):
            known: Tensor = run_fused(convolution, x, added, activation_number(self.activation))
            if known is not NotImplemented:
                return known
            y = convolution.fused(x, Epilogue(self.activation, added))
            if y is not None:
                return y
        return followed(convolution(x), self.activation, added)

    def train(self, mode: bool = True) -> Self:
        """Switch to ``eval()`` mode; raise ``InvalidInputError`` otherwise, since a folded batch norm cannot train."""
        if mode:
            raise InvalidInputError(
                f"this model has convolutions fused with {', '.join(self.parts)}, and is for inference only: train the "
                "model that was given to mucudnn.optimize, or optimize it with Config(fuse=False)"
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"fused with {', '.join(self.parts)}"


def followed(y: Tensor, activation: str | None, added: Tensor | None) -> Tensor:
    """Add ``added`` to y and apply the activation with torch, in place if possible.

    ``InPlaceTimes`` replaces this function.
    """
    if added is not None and not _takes(y, added):
        y, added = y + added, None
    return Epilogue(activation, added).apply(y)


def _is_called_as_it_stands(module: nn.Module) -> bool:
    """Return whether calling the module runs only its ``forward``, without hooks or compilation."""
    return not (torch.compiler.is_compiling() or _has_any_global_hook() or has_hooks(module))  # type: ignore[no-untyped-call]


def _takes(y: Tensor, added: object) -> bool:
    """Return whether y + added has y's shape and dtype, so that the sum can be written into y."""
    return isinstance(added, Tensor) and added.shape == y.shape and added.dtype == y.dtype
