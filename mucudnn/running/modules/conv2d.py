"""The drop-in for ``torch.nn.Conv2d``: the same module, but running tuned algorithms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mucudnn.core.problem import Operation
from mucudnn.running import operators
from mucudnn.running.eager import calls
from mucudnn.running.eager.hot_path import is_eager
from mucudnn.running.modules.tuned_module import TunedModule, are_pairs, may_be_tuned, operator_takes, padded

_FORWARD = Operation.FORWARD  # looked up in every call


class Conv2d(TunedModule, torch.nn.Conv2d):
    """A ``torch.nn.Conv2d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution.
    ``tuned`` has the choices with reasons. x: (N, C, H, W) or (C, H, W), y: (N, K, P, Q) or (K, P, Q).

    >>> import torch, mucudnn
    >>> layer = mucudnn.Conv2d(in_channels=3, out_channels=8, kernel_size=3, stride=2, padding=1)
    >>> layer(torch.zeros(4, 3, 32, 48)).shape  # (N, C, H, W) -> (N, K, P, Q)
    torch.Size([4, 8, 16, 24])
    """

    _untuned_class = torch.nn.Conv2d

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = None if self.choices is None else self._tuned_forward(input, weight, bias)
        return super()._conv_forward(input, weight, bias) if y is None else y

    def _tuned_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return y by the tuned choice; None if torch's convolution is to run.

        Torch's convolution also handles unusual inputs and reports errors.
        """
        is_plain = not torch.compiler.is_compiling() and is_eager(x, weight, bias)
        if not is_plain and not operator_takes(x, weight, (3, 4)):
            return None
        if x.dim() == 3:
            y = self._tuned_forward(x.unsqueeze(0), weight, bias)
            return None if y is None else y.squeeze(0)
        if self.padding_mode == "zeros" and type(self.padding) is tuple:
            padding: Any = self.padding
        else:
            x, padding = padded(self, x, weight)
        if not are_pairs(self.stride, padding, self.dilation):
            return None
        choices = self.choices
        geometry = self.stride, padding, self.dilation, self.groups
        if choices is None or not may_be_tuned(choices, x.shape):
            return None
        if is_plain:
            return calls.convolve_plain(_FORWARD, x, weight, bias, (*geometry, choices))
        return operators.conv2d(x, weight, bias, *geometry, choices.handle)
