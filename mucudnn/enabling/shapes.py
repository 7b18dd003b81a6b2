"""Reads calls of torch's convolutions: which problems compute the result, and both gradients.

A convolution with one dimension is one of images of height 1. A transposed one is the backward data of a convolution,
run forward: its input is that convolution's dy, and its result the dx. So its own dx is a forward convolution, and its
dw the filter gradient with the two exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.running.devices import largest_batch_size
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ITEM_BYTES, ConvProblem, Operation, Pair

_DTYPE_NAMES = {getattr(torch, name): name for name in ITEM_BYTES}
_OURS = {torch_format: ours for ours, torch_format in TORCH_FORMATS.items()}


@dataclass(frozen=True, slots=True)
class Shape:
    """The geometry of a call: what does not depend on the values.

    problem: of the convolution in FORWARD, which a transposed call runs backward. batch_size: samples. is_1d: tensors
    have no height. device: where they are. y_format: in which torch answers.
    """

    problem: ConvProblem
    batch_size: int
    device: torch.device
    is_1d: bool
    is_transposed: bool
    y_format: torch.memory_format

    @property
    def geometry(self) -> tuple[Pair, Pair, Pair, int]:
        """Stride, padding, dilation and groups, as operators of two dimensions take them."""
        return self.problem.stride, self.problem.padding, self.problem.dilation, self.problem.groups

    @property
    def of_result(self) -> Operation:
        """The operation that computes y."""
        return Operation.BACKWARD_DATA if self.is_transposed else Operation.FORWARD

    @property
    def of_input_gradient(self) -> Operation:
        """The operation that computes dx."""
        return Operation.FORWARD if self.is_transposed else Operation.BACKWARD_DATA


def shape_of(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Shape | None:
    """Read a call of ``aten::convolution``; ``None`` for what is never tuned.

    That is what has three dimensions, other dtypes, no samples, and what is wrong: torch says so. x: (N, C, H, W) or
    (N, C, W), w: (K, C // groups, R, S) or (K, C // groups, S); of a transposed one (C, K // groups, R, S).
    """
    is_1d = x.dim() == 3
    if not _are_images(x, w) or len(x) == 0 or groups < 1:
        return None
    x, w = as_images(x, is_1d), as_images(w, is_1d)
    of_rows = (partial(_with_height, height=1), partial(_with_height, height=0))
    as_pair, as_zero_pair = of_rows if is_1d else (_pair, _pair)
    pairs = as_pair(stride), as_zero_pair(padding), as_pair(dilation)
    extra = as_zero_pair(output_padding)
    try:
        y_format = _torchs_format(x, w, pairs, groups, is_transposed, extra)
        large = _result_of_transposed(x, w, pairs, groups, extra) if is_transposed else x.shape[1:]
        problem = _problem(large, w, pairs, groups, x.dtype, y_format)
    except (InvalidInputError, RuntimeError):  # the latter of torch, which will say the same
        return None
    shape = Shape(problem, len(x), x.device, is_1d, is_transposed, y_format)
    return shape if _fits(shape, x, w) else None


def as_images(tensor: Tensor, is_1d: bool) -> Tensor:
    """View a tensor as one with a height, of 1 where it has none. Torch makes it contiguous for that, too."""
    return tensor.contiguous().unsqueeze(2) if is_1d else tensor


def _are_images(x: Tensor, w: Tensor) -> bool:
    """Tell whether both are dense tensors of one or two dimensions, and alike."""
    alike = (x.dtype, x.device, x.layout, x.dim()) == (w.dtype, w.device, w.layout, w.dim())
    return alike and x.dtype in _DTYPE_NAMES and x.layout is torch.strided and x.dim() in (3, 4)


def _with_height(values: Sequence[int], height: int) -> Pair:
    (width,) = values
    return height, width


def _pair(values: Sequence[int]) -> Pair:
    height, width = values
    return height, width


def _torchs_format(
    x: Tensor, w: Tensor, pairs: Sequence[Pair], groups: int, is_transposed: bool, output_padding: Pair
) -> torch.memory_format:
    """Tell in which memory format torch would compute and answer."""
    backend: Any = torch._C._select_conv_backend(x, w, None, *pairs, is_transposed, output_padding, groups, None)
    return torch._C._conv_determine_backend_memory_format(x, w, backend)


def _result_of_transposed(
    x: Tensor, w: Tensor, pairs: Sequence[Pair], groups: int, output_padding: Pair
) -> tuple[int, int, int]:
    """Return channels, height and width."""
    height, width = (
        (size - 1) * stride - 2 * padding + dilation * (extent - 1) + extra + 1
        for size, extent, stride, padding, dilation, extra in zip(
            x.shape[2:], w.shape[2:], *pairs, output_padding, strict=True
        )
    )
    return w.shape[1] * groups, height, width


def _problem(
    large: Sequence[int],
    w: Tensor,
    pairs: Sequence[Pair],
    groups: int,
    dtype: torch.dtype,
    torch_format: torch.memory_format,
) -> ConvProblem:
    """Make the problem. large: channels, height and width of its x."""
    c, height, width = large
    k, _, r, s = w.shape
    stride, padding, dilation = pairs
    geometry = (stride, padding, dilation, groups)
    return ConvProblem(
        Operation.FORWARD, c, height, width, k, r, s, *geometry, _DTYPE_NAMES[dtype], _OURS[torch_format]
    )


def _fits(shape: Shape, x: Tensor, w: Tensor) -> bool:
    """Tell whether the operands are those of the problem: torch allows output padding that no convolution undoes."""
    problem, n = shape.problem, shape.batch_size
    images = problem.y_shape(n) if shape.is_transposed else problem.x_shape(n)
    return (
        tuple(x.shape) == images
        and tuple(w.shape) == problem.w_shape()
        and n <= largest_batch_size(problem, shape.device.type)
    )
