"""The drop-in for ``torch.nn.Conv2d``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from mucudnn import operators
from mucudnn.operators import Choices

if TYPE_CHECKING:
    from mucudnn.tuning import TunedProblem


class Conv2d(torch.nn.Conv2d):
    """A ``torch.nn.Conv2d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution.
    ``tuned`` says what was chosen for it and why. x: (N, C, H, W) or (C, H, W), y: (N, K, P, Q) or (K, P, Q).
    """

    tuned: tuple[TunedProblem, ...] = ()
    choices: Choices | None = None

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = None if self.choices is None else self._tuned_forward(self.choices, input, weight, bias)
        return super()._conv_forward(input, weight, bias) if y is None else y

    def _tuned_forward(self, choices: Choices, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """``None`` where nothing is tuned: torch's convolution, without the overhead of the operator."""
        if not isinstance(x, Tensor) or not _operator_takes(x):  # a torch.fx.Proxy, for one, is no tensor
            return None
        if x.dim() == 3:
            y = self._tuned_forward(choices, x.unsqueeze(0), weight, bias)
            return None if y is None else y.squeeze(0)
        x, padding = self._padded(x, weight)
        if not torch.compiler.is_compiling() and x.shape not in choices.x_shapes:
            return None
        return operators.conv2d(x, weight, bias, self.stride, padding, self.dilation, self.groups, choices.handle)

    def _padded(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Any]:
        """Pad here what is not zeros on both sides alike; the rest of the padding is for the operator."""
        if self.padding_mode != "zeros":
            return F.pad(x, self._reversed_padding_repeated_twice, self.padding_mode), (0, 0)
        if self.padding == "valid":
            return x, (0, 0)
        if self.padding == "same":
            total_h, total_w = (d * (size - 1) for d, size in zip(self.dilation, weight.shape[2:], strict=True))
            if total_h % 2 or total_w % 2:  # an even filter: the odd row and column belong to the bottom and right
                x = F.pad(x, (0, total_w % 2, 0, total_h % 2))
            return x, (total_h // 2, total_w // 2)
        return x, self.padding


def _operator_takes(x: Tensor) -> bool:
    """The operators have no forward-mode derivative, no rules for ``torch.func`` and no complex arithmetic."""
    if x.dim() not in (3, 4) or x.is_complex() or x.layout is not torch.strided:
        return False
    if torch.compiler.is_compiling():
        return True
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()
