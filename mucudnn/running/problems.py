"""The ``ConvProblem`` (shapes, dtype and operation) of a convolution call, and the rules of torch that it follows."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ITEM_BYTES, MOST_SAMPLES, ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.memory import TORCH_FORMATS, dense_strides

_DTYPE_NAMES = {getattr(torch, name): name for name in ITEM_BYTES}  # dtypes that problems support
_MEMORY_FORMATS = {torchs_format: memory_format for memory_format, torchs_format in TORCH_FORMATS.items()} | {
    torch.channels_last_3d: MemoryFormat.CHANNELS_LAST
}

# Operations of a transposed convolution -> operations of its problem. It is the backward data of another convolution:
# its x is that convolution's dy, and its result the dx.
_TRANSPOSED = {
    Operation.FORWARD: Operation.BACKWARD_DATA,
    Operation.BACKWARD_DATA: Operation.FORWARD,
    Operation.BACKWARD_FILTER: Operation.BACKWARD_FILTER,
}


def problem_operation(operation: Operation, *, transposed: bool) -> Operation:
    """Return the operation of the problem that computes a module's operation; for a transposed module they differ."""
    return _TRANSPOSED[operation] if transposed else operation


def problem_of_call(
    x: Tensor,
    w: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    is_transposed: bool = False,
    output_padding: Sequence[int] | None = None,
    x_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    memory_format: MemoryFormat | None = None,
) -> ConvProblem | None:
    """Return the problem of a call of torch's convolution: FORWARD, or BACKWARD_DATA for a transposed convolution.

    x: (N, C, H, W), w: (K, C // groups, R, S), of volumes both with a depth. For a transposed convolution x is the
    problem's y, (N, K, P, Q), and the call's result the problem's x. Tensors without H, and geometries of one number,
    are those of images of height 1.

    x_shape: shape of x after padding that torch does as a separate step; by default, that of x.
    dtype: the dtype in which torch computes; by default, that of x.
    memory_format: memory format of the result; by default, the one that torch decides on.

    Returns None for calls that no problem describes: other numbers of dimensions, dtypes or layouts, no samples or too
    many, output padding for which no convolution has this backward data, and invalid calls, which torch rejects.
    """
    computed = x.dtype if dtype is None else dtype
    shape, w_shape = tuple(x.shape if x_shape is None else x_shape), tuple(w.shape)
    if len(shape) != len(w_shape) or len(shape) not in (3, 4, 5) or shape[0] == 0 or groups < 1:
        return None
    if output_padding is None:
        output_padding = (0,) * (len(shape) - 2)
    if computed not in _DTYPE_NAMES or x.layout is not torch.strided or w.layout is not torch.strided:
        return None
    if len(shape) == 3:  # torch makes x contiguous
        shape, w_shape = (*shape[:2], 1, shape[2]), (*w_shape[:2], 1, w_shape[2])
        stride, padding, dilation, output_padding = (1, *stride), (0, *padding), (1, *dilation), (0, output_padding[-1])
    try:
        geometry = tuple(stride), tuple(padding), tuple(dilation), groups
        if memory_format is None:
            if (x.dtype, x.device) != (w.dtype, w.device):
                return None
            images, filters = (x, w) if x.dim() > 3 else (x.contiguous().unsqueeze(2), w.contiguous().unsqueeze(2))
            memory_format = torchs_memory_format(
                images, filters, geometry, is_transposed=is_transposed, output_padding=output_padding
            )
        result = transposed_shape(shape, w_shape, geometry, output_padding) if is_transposed else shape
        operation = problem_operation(Operation.FORWARD, transposed=is_transposed)
        (n, c, *depth, h, width), (k, _, *taps, r, s) = result, w_shape
        described: tuple[Any, ...] = *geometry, _DTYPE_NAMES[computed], memory_format, *depth, *taps
        problem = ConvProblem(operation, c, h, width, k, r, s, *described)
    except (InvalidInputError, RuntimeError, TypeError, ValueError):  # torch raises errors, and will raise them again
        return None
    described_shape = problem.y_shape(n) if is_transposed else problem.x_shape(n)
    is_described = (shape, w_shape) == (described_shape, problem.w_shape())
    return problem if is_described and n <= largest_batch_size(problem, x.device.type) else None


def largest_batch_size(problem: ConvProblem, device_type: str) -> int:
    """Return the largest supported number of samples in a mini-batch.

    On a GPU x and y may exceed ``MOST_ELEMENTS`` elements, since algorithms get smaller micro-batches there.
    """
    return MOST_SAMPLES if device_type == "cuda" else min(MOST_SAMPLES, problem.countable_samples())


def transposed_shape(
    x_shape: Sequence[int], w_shape: Sequence[int], geometry: Sequence[Any], output_padding: Sequence[int]
) -> tuple[int, ...]:
    """Return (N, C, H, W) of the transposed convolution of (N, K, P, Q) with (K, C // groups, R, S).

    geometry: stride, padding, dilation, groups.
    """
    *steps, groups = geometry
    axes = zip(x_shape[2:], w_shape[2:], *steps, output_padding, strict=True)
    extent = (
        (size - 1) * stride - 2 * padding + dilation * (taps - 1) + extra + 1
        for size, taps, stride, padding, dilation, extra in axes
    )
    return x_shape[0], w_shape[1] * groups, *extent


def is_backward_data(stride: Sequence[int], output_padding: Sequence[int]) -> bool:
    """Return whether a transposed convolution is the backward data of some convolution.

    Torch allows output padding up to the dilation. With output padding of the stride or more, that convolution would
    have more outputs than the x of the transposed one.
    """
    return all(extra < step for extra, step in zip(output_padding, stride, strict=True))


def torchs_filter_strides(problem: ConvProblem, x: Tensor, w: Tensor, geometry: Sequence[Any]) -> tuple[int, ...]:
    """Return the strides of the gradient of the filter as torch returns it on the CPU.

    Strides of dimensions of size 1 do not matter to a computation, but DistributedDataParallel compares them.
    """
    *sizes, groups = geometry
    backend: Any = torch._C._select_conv_backend(x, w, None, *sizes, False, (0,) * len(sizes[0]), groups, None)
    shape = problem.w_shape()
    if prod(problem.window) == 1 and backend.name != "Mkldnn" and w.stride()[:2] == (shape[1], 1):
        return w.stride()
    return dense_strides(shape, problem.memory_format)


def torchs_memory_format(
    x: Tensor,
    w: Tensor,
    geometry: Sequence[Any],
    *,
    is_transposed: bool = False,
    output_padding: Sequence[int] | None = None,
) -> MemoryFormat:
    """Return the memory format in which torch would compute the result. Raises torch's ``RuntimeError``."""
    *sizes, groups = geometry
    extra = (0,) * len(sizes[0]) if output_padding is None else output_padding
    backend: Any = torch._C._select_conv_backend(x, w, None, *sizes, is_transposed, extra, groups, None)
    return _MEMORY_FORMATS[torch._C._conv_determine_backend_memory_format(x, w, backend)]
