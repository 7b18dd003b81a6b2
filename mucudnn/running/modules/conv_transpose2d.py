"""The drop-in for ``torch.nn.ConvTranspose2d``, and its operator ``mucudnn::conv_transpose2d``.

A transposed convolution is the backward data of another convolution: its input is that convolution's dy, its result the
dx. So the dx of the transposed convolution is a forward convolution, and its dw is the backward filter with x and dy
exchanged. The tuned problem is the other convolution's, whose x is the module's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mucudnn.core.problem import Operation
from mucudnn.kernels.memory import TORCH_FORMATS
from mucudnn.running import operators
from mucudnn.running.choices import choices_of
from mucudnn.running.definition import bias_gradient, convolution_flops, define
from mucudnn.running.eager.hot_path import is_eager
from mucudnn.running.modules.tuned_module import TunedModule, are_pairs, may_be_tuned, operator_takes
from mucudnn.running.problems import torchs_memory_format

_Geometry = Sequence[Any]  # stride, padding, output padding, dilation, groups


class ConvTranspose2d(TunedModule, torch.nn.ConvTranspose2d):
    """A ``torch.nn.ConvTranspose2d``: same arguments, same state dict, same result.

    Until it is tuned, and for every shape, dtype or device it was not tuned for, it runs torch's convolution.
    ``tuned`` has the choices with reasons, named by the convolution that the module transposes: y is the backward data
    of that convolution, dx its forward operation. x: (N, C, P, Q) or (C, P, Q), y: (N, K, H, W) or (K, H, W).

    >>> import torch, mucudnn
    >>> layer = mucudnn.ConvTranspose2d(in_channels=8, out_channels=3, kernel_size=4, stride=2, padding=1)
    >>> layer(torch.zeros(4, 8, 16, 24)).shape  # (N, C, P, Q) -> (N, K, H, W)
    torch.Size([4, 3, 32, 48])
    """

    _untuned_class = torch.nn.ConvTranspose2d

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        y = None if self.choices is None else self._tuned_forward(input, output_size)
        return super().forward(input, output_size) if y is None else y

    def _tuned_forward(self, x: Tensor, output_size: list[int] | None) -> Tensor | None:
        """Compute y with the tuned choice. Returns None if torch's convolution is to run, which also reports errors."""
        assert self.choices is not None
        if not operator_takes(x, self.weight, (3, 4)) or self.padding_mode != "zeros":
            return None
        stride, dilation, weight = self.stride, self.dilation, self.weight
        padding: Any = self.padding
        if not are_pairs(stride, padding, dilation) or weight.dim() != 4:
            return None
        output_padding = self._output_padding(x, output_size, stride, padding, self.kernel_size, 2, dilation)  # type: ignore[arg-type]
        images = x if x.dim() == 4 else x.unsqueeze(0)
        geometry = stride, padding, output_padding, dilation, self.groups
        if not may_be_tuned(self.choices, y_shape(images, weight, geometry)):
            return None
        is_inference = not torch.is_grad_enabled() and is_eager(images, weight, self.bias)
        compute = _computed if is_inference else conv_transpose2d  # bypass the dispatcher if nothing hooks into it
        y: Tensor = compute(images, weight, self.bias, *geometry, self.choices.handle)
        return y if x.dim() == 4 else y.squeeze(0)


def y_shape(x: Tensor, w: Tensor, geometry: _Geometry) -> tuple[int, int, int, int]:
    """Return (N, K, H, W) of the transposed convolution of x: (N, C, P, Q) with w: (C, K // groups, R, S)."""
    stride, padding, output_padding, dilation, groups = geometry
    (n, _, p, q), (_, k, r, s) = x.shape, w.shape
    h = (p - 1) * stride[0] - 2 * padding[0] + dilation[0] * (r - 1) + output_padding[0] + 1
    width = (q - 1) * stride[1] - 2 * padding[1] + dilation[1] * (s - 1) + output_padding[1] + 1
    return n, k * groups, h, width


def is_backward_data(stride: Sequence[int], output_padding: Sequence[int]) -> bool:
    """Return whether a transposed convolution is the backward data of some convolution.

    Torch allows output padding up to the dilation. With output padding of the stride or more, that convolution would
    have more outputs than the x of the transposed one.
    """
    return output_padding[0] < stride[0] and output_padding[1] < stride[1]


def _computed(x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Return y by the tuned choice, or by torch's convolution. rest: ``_Geometry``, then the handle of ``Choices``."""
    *geometry, tuning = rest
    y = _as_backward_data(x, w, geometry, tuning) if _are_images(x, w, bias, groups=geometry[-1]) else None
    if y is None:
        return _torchs(x, w, bias, *rest)
    return y if bias is None else y.add_(bias.view(-1, 1, 1))


def _are_images(x: Tensor, w: Tensor, bias: Tensor | None, groups: int) -> bool:
    """Return whether x, w and bias match and have the right dimensions. Torch reports the errors of other operands."""
    if x.dim() != 4 or w.dim() != 4 or (w.dtype, w.device) != (x.dtype, x.device):
        return False
    return bias is None or (bias.shape, bias.dtype, bias.device) == ((w.shape[1] * groups,), x.dtype, x.device)


def _as_backward_data(x: Tensor, w: Tensor, geometry: _Geometry, tuning: int) -> Tensor | None:
    """Return y without bias, computed as backward data; None if torch's convolution is to run."""
    stride, padding, output_padding, dilation, groups = geometry
    choices = choices_of(tuning)
    if choices is None or not is_backward_data(stride, output_padding):
        return None
    shape = y_shape(x, w, geometry)
    if min(shape) < 1:
        return None
    lent = x.new_empty(()).expand(shape)  # has a shape but no memory, so that the filter determines the format of y
    convolution = stride, padding, dilation, groups
    wanted = torchs_memory_format(x, w, convolution, is_transposed=True, output_padding=output_padding)
    if torchs_memory_format(lent, w, convolution) is not wanted:
        w = torch.empty_like(w, memory_format=TORCH_FORMATS[wanted]).copy_(w)
        if torchs_memory_format(lent, w, convolution) is not wanted:
            return None  # a filter of one element is in both formats
    return operators.computed(Operation.BACKWARD_DATA, lent, w, x, convolution, choices)


def _torchs(x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    stride, padding, output_padding, dilation, groups, _ = rest
    return torch.conv_transpose2d(x, w, bias, stride, padding, output_padding, groups, dilation)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, *ctx.rest = inputs
    ctx.save_for_backward(x, w)  # without the bias, which may be changed in place before the backward pass
    both = [output.is_contiguous(), output.is_contiguous(memory_format=torch.channels_last)]
    ctx.memory_format = torch.channels_last if both == [False, True] else torch.contiguous_format


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    """Return the gradients of x, w and bias. dy: (N, K, H, W), the x of the convolution that this one transposes."""
    x, w = ctx.saved_tensors
    of_x, of_w, of_bias = ctx.needs_input_grad[:3]
    stride, padding, output_padding, dilation, groups, tuning = ctx.rest
    if not _is_batch_of_gradients(dy):
        dy = dy.contiguous(memory_format=ctx.memory_format)  # as torch does
    if not is_backward_data(stride, output_padding):
        geometry = stride, padding, dilation, True, output_padding, groups
        wanted = of_x, of_w, of_bias
        sizes = [w.shape[1] * groups] if of_bias else None
        gradients = torch.ops.aten.convolution_backward(dy, x, w, sizes, *geometry, wanted)
        return *gradients, *(None for _ in ctx.rest)
    rest = stride, padding, dilation, groups, tuning
    dx = operators.conv2d(dy, w, None, *rest) if of_x else None
    dw = operators.conv2d_backward_filter(dy, w, x, *rest) if of_w else None
    return dx, dw, bias_gradient(dy) if of_bias else None, *(None for _ in ctx.rest)


def _is_batch_of_gradients(dy: Tensor) -> bool:
    """Return whether dy is seen by a vmap, which knows no memory formats."""
    is_batch: bool = torch._C._functorch.is_batchedtensor(dy) or torch._C._functorch.is_legacy_batchedtensor(dy)
    return is_batch


def _flops(x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any, out_val: Tensor) -> int:
    stride, padding, output_padding, dilation, groups, _ = rest
    return convolution_flops(x, w, bias, stride, padding, dilation, True, output_padding, groups, out_val=out_val)


conv_transpose2d = define(
    "conv_transpose2d(Tensor x, Tensor w, Tensor? bias, SymInt[2] stride, SymInt[2] padding, SymInt[2] output_padding, "
    "SymInt[2] dilation, SymInt groups, int tuning) -> Tensor",
    _computed,
    fake=_torchs,
    save=_save,
    gradients=_gradients,
    flops=_flops,
)
