"""Translation of calls of torch's convolutions into the problems of the result and both gradients.

A 1-D convolution is treated as one of images of height 1. A transposed convolution is the backward data of another
convolution: its input is that convolution's dy, and its result the dx. So the dx of the transposed convolution is a
forward convolution, and its dw is the backward filter with x and dy exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mucudnn.enabling.status import ShapeStats
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.modules.conv_transpose2d import y_shape
from mucudnn.running.devices import largest_batch_size
from mucudnn.running.problems import DTYPE_NAMES, torchs_memory_format
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem, Operation, Pair


@dataclass(slots=True, eq=False)
class DispatchedCall:
    """Shape of a call of torch's convolution, and statistics of its problems: the result and both gradients.

    problem: the FORWARD problem of the convolution; a transposed call runs its backward data. is_1d: whether the
    tensors have no height. y, dx, dw: statistics of the result and both gradients, or None until first needed and for
    operations that the config excludes.
    """

    problem: ConvProblem
    batch_size: int
    device: torch.device
    is_1d: bool
    is_transposed: bool
    y: ShapeStats | None = None
    dx: ShapeStats | None = None
    dw: ShapeStats | None = None

    @property
    def y_format(self) -> torch.memory_format:
        """Memory format of the result that torch's convolution returns."""
        return TORCH_FORMATS[self.problem.memory_format]

    @property
    def geometry(self) -> tuple[Pair, Pair, Pair, int]:
        """Stride, padding, dilation and groups of the call, in the form that 2-D operators take."""
        return self.problem.stride, self.problem.padding, self.problem.dilation, self.problem.groups

    @property
    def of_result(self) -> Operation:
        """The operation that computes y, the call's result: forward, for a transposed call backward data."""
        return Operation.BACKWARD_DATA if self.is_transposed else Operation.FORWARD

    @property
    def of_input_gradient(self) -> Operation:
        """The operation that computes dx, the gradient of the input: backward data, for a transposed call forward."""
        return Operation.FORWARD if self.is_transposed else Operation.BACKWARD_DATA


def call_of(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> DispatchedCall | None:
    """Describe a call of ``aten::convolution`` by mucudnn's types. Returns None for calls that are never tuned.

    Never tuned are 3-D calls, calls with unsupported dtypes or no samples, and invalid calls, which torch refuses. x:
    (N, C, H, W) or (N, C, W), w: (K, C // groups, R, S) or (K, C // groups, S), if transposed (C, K // groups, R, S).
    """
    is_1d = x.dim() == 3
    if not _are_images(x, w) or len(x) == 0 or groups < 1:
        return None
    x, w = as_images(x, is_1d), as_images(w, is_1d)
    height = ((1,), (0,)) if is_1d else ((), ())  # for stride and dilation, and for padding
    pairs = _pair(*height[0], *stride), _pair(*height[1], *padding), _pair(*height[0], *dilation)
    extra, geometry = _pair(*height[1], *output_padding), (*pairs, groups)
    try:
        memory_format = torchs_memory_format(x, w, geometry, is_transposed=is_transposed, output_padding=extra)
        large = y_shape(x, w, (*pairs[:2], extra, pairs[2], groups)) if is_transposed else x.shape
        (_, c, h, width), (k, _, r, s) = large, w.shape
        problem = ConvProblem(Operation.FORWARD, c, h, width, k, r, s, *geometry, DTYPE_NAMES[x.dtype], memory_format)
    except (InvalidInputError, RuntimeError):  # torch raises RuntimeError here, and will raise it again
        return None
    operand = problem.y_shape(len(x)) if is_transposed else problem.x_shape(len(x))
    if (tuple(x.shape), tuple(w.shape)) != (operand, problem.w_shape()):
        return None  # output padding for which no convolution has this backward data
    fits = len(x) <= largest_batch_size(problem, x.device.type)
    return DispatchedCall(problem, len(x), x.device, is_1d, is_transposed) if fits else None


def as_images(tensor: Tensor, is_1d: bool) -> Tensor:
    """Return a 1-D tensor as images of height 1 if ``is_1d``, made contiguous as torch does, else the tensor itself."""
    return tensor.contiguous().unsqueeze(2) if is_1d else tensor


def _are_images(x: Tensor, w: Tensor) -> bool:
    """Return whether x and w are dense 1-D or 2-D operands with equal dtype, device and number of dimensions."""
    alike = (x.dtype, x.device, x.layout, x.dim()) == (w.dtype, w.device, w.layout, w.dim())
    return alike and x.dtype in DTYPE_NAMES and x.layout is torch.strided and x.dim() in (3, 4)


def _pair(height: int, width: int) -> Pair:
    return height, width
