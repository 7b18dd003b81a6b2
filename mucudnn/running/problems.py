"""The ``ConvProblem`` (shapes, dtype and operation) of a convolution call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mucudnn.core.problem import ITEM_BYTES, ConvProblem, MemoryFormat, Operation, Pair
from mucudnn.kernels.memory import TORCH_FORMATS

Geometry = tuple[Pair, Pair, Pair, int]  # stride, padding, dilation, groups

DTYPE_NAMES = {getattr(torch, name): name for name in ITEM_BYTES}  # dtypes that problems support
_MEMORY_FORMATS = {torch_format: ours for ours, torch_format in TORCH_FORMATS.items()}


def problem_of(operation: Operation, x: Tensor, w: Tensor, geometry: Geometry) -> ConvProblem:
    """Return the problem of an operation for the convolution of x, (N, C, H, W), with w, (K, C // groups, R, S).

    The problem has the memory format in which torch would return the result. The dtype of x must be in ``DTYPE_NAMES``.
    Raises ``InvalidInputError`` for an invalid convolution.
    """
    _, c, height, width = x.shape
    k, _, r, s = w.shape
    memory_format = torchs_memory_format(x, w, geometry)
    return ConvProblem(operation, c, height, width, k, r, s, *geometry, DTYPE_NAMES[x.dtype], memory_format)


def torchs_filter_strides(problem: ConvProblem, x: Tensor, w: Tensor, geometry: Geometry) -> tuple[int, ...]:
    """Return the strides of the gradient of the filter as torch returns it on the CPU.

    Strides of dimensions of size 1 do not matter to a computation, but DistributedDataParallel compares them.
    """
    _, c, r, s = problem.w_shape()
    *sizes, groups = geometry
    backend: Any = torch._C._select_conv_backend(x, w, None, *sizes, False, (0, 0), groups, None)
    if r == s == 1 and backend.name != "Mkldnn" and w.stride()[:2] == (c, 1):
        return w.stride()
    return (c * r * s, r * s, s, 1) if problem.memory_format is MemoryFormat.CONTIGUOUS else (r * s * c, 1, s * c, c)


def torchs_memory_format(
    x: Tensor, w: Tensor, geometry: Geometry, *, is_transposed: bool = False, output_padding: Pair = (0, 0)
) -> MemoryFormat:
    """Return the memory format in which torch would compute the result. Raises torch's ``RuntimeError``."""
    *sizes, groups = geometry
    backend: Any = torch._C._select_conv_backend(x, w, None, *sizes, is_transposed, output_padding, groups, None)
    return _MEMORY_FORMATS[torch._C._conv_determine_backend_memory_format(x, w, backend)]
