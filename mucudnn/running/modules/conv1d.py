"""The drop-in for ``torch.nn.Conv1d``: a convolution of images of height 1."""

from __future__ import annotations

import torch
from torch import Tensor

from mucudnn.core.problem import Operation
from mucudnn.running.eager import calls
from mucudnn.running.modules.tuned_module import TunedModule, are_tuples, may_be_tuned, operator_takes, padded


class Conv1d(TunedModule, torch.nn.Conv1d):
    """A ``torch.nn.Conv1d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution. ``tuned``
    has the choices with reasons; they treat x as images of height 1. x: (N, C, L) or (C, L), y: (N, K, Q) or (K, Q).

    >>> import torch, mucudnn
    >>> layer = mucudnn.Conv1d(in_channels=3, out_channels=8, kernel_size=3, stride=2, padding=1)
    >>> layer(torch.zeros(4, 3, 48)).shape  # (N, C, L) -> (N, K, Q)
    torch.Size([4, 8, 24])
    """

    _untuned_class = torch.nn.Conv1d

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = None if self.choices is None else self._tuned_forward(input, weight, bias)
        return super()._conv_forward(input, weight, bias) if y is None else y

    def _tuned_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute y with the tuned choice. Returns None if torch's convolution is to run, which also reports errors."""
        assert self.choices is not None
        if not operator_takes(x, weight, (2, 3)) or weight.dim() != 3:
            return None
        if x.dim() == 2:
            y = self._tuned_forward(x.unsqueeze(0), weight, bias)
            return None if y is None else y.squeeze(0)
        x, padding = padded(self, x, weight)
        if not are_tuples(self.stride, padding, self.dilation, length=1):
            return None
        images = x.contiguous().unsqueeze(2)  # as torch does
        if not may_be_tuned(self.choices, images.shape):
            return None
        geometry = (1, self.stride[0]), (0, padding[0]), (1, self.dilation[0]), self.groups
        return calls.convolve(Operation.FORWARD, images, weight.unsqueeze(2), bias, *geometry, self.choices).squeeze(2)
