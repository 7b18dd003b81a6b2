"""A convolution together with what follows it in inference: folded batch norm, an addition, an activation."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mucudnn.kernels.compiled.stages import activation_number
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.modules.conv2d import Conv2d
from mucudnn.running.eager import hot_path
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import ADDITION, WithEpilogue

run_fused = hot_path.fused  # ``in_place`` puts another in its place


class FusedConvolution(nn.Module):
    """Computes activation(convolution(x) + added): inside the algorithm, where one is tuned that does so.

    Else the last two are computed in place on what the convolution has just written.

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
        parts = self.batch_norm and "batch norm", ADDITION if self.adds else None, self.activation
        return tuple(part for part in parts if part is not None)

    @property
    def epilogue(self) -> WithEpilogue | None:
        """Epilogue that an algorithm may compute where it writes y; ``None``: there is none."""
        if not isinstance(self.convolution, nn.Conv2d) or not (self.adds or self.activation):
            return None
        return WithEpilogue(self.activation, self.adds)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        convolution = self._modules["convolution"]  # found sooner than the attribute
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
        """Refuse training. Raises ``InvalidInputError``."""
        if mode:
            raise InvalidInputError(
                f"this model has convolutions fused with {', '.join(self.parts)}, and is for inference alone: train "
                "the model that was given to mucudnn.optimize, or optimize it with Config(fuse=False)"
            )
        return super().train(mode)

    def extra_repr(self) -> str:
        return f"fused with {', '.join(self.parts)}"


def followed(y: Tensor, activation: str | None, added: Tensor | None) -> Tensor:
    """Compute the rest by torch, in place where y can hold it. ``in_place`` puts itself around this function."""
    if added is not None and not _takes(y, added):
        y, added = y + added, None
    return Epilogue(activation, added).apply(y)


def has_hooks(module: nn.Module) -> bool:
    """Tell whether somebody has hooked on to the calls of a module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_called_as_it_stands(module: nn.Module) -> bool:
    """Tell whether a call would run ``forward`` and nothing else, and nobody watches it."""
    return not (torch.compiler.is_compiling() or _has_any_global_hook() or has_hooks(module))  # type: ignore[no-untyped-call]


def _takes(y: Tensor, added: object) -> bool:
    """Tell whether the sum is of y's shape and dtype, and can be written into y."""
    return isinstance(added, Tensor) and added.shape == y.shape and added.dtype == y.dtype
