"""The drop-in for ``torch.nn.Conv2d``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from mucudnn.running import operators
from mucudnn.running.filter_cache import CachedFilter, FilterCache, is_inference
from mucudnn.running.operators import Choices
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ITEM_BYTES

if TYPE_CHECKING:
    from mucudnn.tuning.result import TunedProblem

_DTYPES = frozenset(getattr(torch, name) for name in ITEM_BYTES)


class Conv2d(torch.nn.Conv2d):
    """A ``torch.nn.Conv2d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution.
    ``tuned`` says what was chosen for it and why. x: (N, C, H, W) or (C, H, W), y: (N, K, P, Q) or (K, P, Q).

    ``kept``, if it is set, keeps prepared filters from call to call, in ``eval()`` without gradients. A filter that has
    changed in any way is prepared again. ``train()`` gives the memory back, as does ``release_workspaces``.
    """

    tuned: tuple[TunedProblem, ...] = ()
    choices: Choices | None = None
    kept: FilterCache | None = None

    @property
    def kept_filters(self) -> tuple[CachedFilter, ...]:
        """What is kept in inference, and why."""
        return () if self.kept is None else self.kept.filters

    def train(self, mode: bool = True) -> Self:
        if mode and self.kept is not None:
            self.kept.release()
        return super().train(mode)

    def __prepare_scriptable__(self) -> NoReturn:
        """Asked for by ``torch.jit.script``, which cannot compile this module, and would put an answer in its place."""
        raise InvalidInputError(
            "torch.jit.script cannot compile mucudnn.Conv2d: use torch.compile, torch.export or torch.jit.trace, or "
            "make each such module torch's own again, module.__class__ = torch.nn.Conv2d, and script the model then"
        )

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tuned = self.choices is not None or self.kept is not None
        y = self._tuned_forward(input, weight, bias) if tuned else None
        return super()._conv_forward(input, weight, bias) if y is None else y

    def _tuned_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """``None`` where nothing is tuned: torch's convolution, without the overhead of the operator.

        So it is for all that is no plain convolution: torch computes it, or says what is wrong.
        """
        if not isinstance(x, Tensor) or not _operator_takes(x):  # a torch.fx.Proxy, for one, is no tensor
            return None
        if x.dim() == 3:
            y = self._tuned_forward(x.unsqueeze(0), weight, bias)
            return None if y is None else y.squeeze(0)
        x, padding = self._padded(x, weight)
        if not _are_pairs(self.stride, padding, self.dilation):
            return None
        geometry = self.stride, padding, self.dilation, self.groups
        compiling, choices, kept = torch.compiler.is_compiling(), self.choices, self.kept
        if not compiling and kept is not None and not self.training and is_inference():
            y = kept.convolve(x, weight, bias, *geometry)
            if y is not None:
                return y
        if choices is None or not (compiling or x.shape in choices.x_shapes):
            return None
        return operators.conv2d(x, weight, bias, *geometry, choices.handle)

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
    """Whether it is dense images of real numbers. What weight and bias are, the operator tells torch's own convolution.

    The operators have no forward-mode derivative, no rules for ``torch.func`` and no complex arithmetic.
    """
    if x.dtype not in _DTYPES or x.is_nested or x.layout is not torch.strided or x.dim() not in (3, 4) or x.is_meta:
        return False
    if torch.compiler.is_compiling():
        return True
    return forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active()


def _are_pairs(stride: Any, padding: Any, dilation: Any) -> bool:
    """As ``torch.nn.Conv2d`` makes them; who sets them by hand may set whatever torch's convolution takes."""
    if type(stride) is type(padding) is type(dilation) is tuple:
        return len(stride) == len(padding) == len(dilation) == 2
    return False
