"""The drop-in for ``torch.nn.Conv2d``: the same module, but running tuned algorithms."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor

from mucudnn.modules.tuned_module import TunedModule, are_pairs, may_be_tuned, operator_takes, padded
from mucudnn.running import operators
from mucudnn.running.eager import calls
from mucudnn.running.eager.hot_path import is_eager
from mucudnn.running.filter_cache import CachedFilter
from mucudnn.words.problem import Operation

_FORWARD = Operation.FORWARD  # looked up in every call


class Conv2d(TunedModule, torch.nn.Conv2d):
    """A ``torch.nn.Conv2d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution.
    ``tuned`` has the choices with reasons. x: (N, C, H, W) or (C, H, W), y: (N, K, P, Q) or (K, P, Q).

    ``filter_cache``, if set, keeps filters in the form that an algorithm prepares between calls, in ``eval()`` mode
    without gradients. A changed filter is prepared again. ``train()`` and ``release_workspaces`` free the memory of the
    cache.

    >>> import torch, mucudnn
    >>> layer = mucudnn.Conv2d(in_channels=3, out_channels=8, kernel_size=3, stride=2, padding=1)
    >>> layer(torch.zeros(4, 3, 32, 48)).shape  # (N, C, H, W) -> (N, K, P, Q)
    torch.Size([4, 8, 16, 24])
    """

    _untuned_class = torch.nn.Conv2d

    @property
    def cached_filters(self) -> tuple[CachedFilter, ...]:
        """The filters that are cached in inference, with reasons."""
        return () if self.filter_cache is None else self.filter_cache.filters

    def train(self, mode: bool = True) -> Self:
        if mode and self.filter_cache is not None:
            self.filter_cache.release()
        return super().train(mode)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tuned = self.choices is not None or self.filter_cache is not None
        y = self._tuned_forward(input, weight, bias) if tuned else None
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
        choices, filters = self.choices, self.filter_cache
        geometry = self.stride, padding, self.dilation, self.groups
        if filters is not None and is_plain and not (self.training or torch.is_grad_enabled()):
            y = filters.convolve(x, weight, bias, geometry)
            if y is not None:
                return y
        if choices is None or not may_be_tuned(choices, x.shape):
            return None
        if is_plain:
            return calls.convolve_plain(_FORWARD, x, weight, bias, (*geometry, choices))
        return operators.conv2d(x, weight, bias, *geometry, choices.handle)
