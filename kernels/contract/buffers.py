"""Views of workspace buffers with shape and dtype, and tensors in a convolution problem's memory format."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, MemoryFormat
from mucudnn.kernels.contract.algorithm import ALIGNMENT_BYTES

TORCH_FORMATS = {
    MemoryFormat.CONTIGUOUS: torch.contiguous_format,
    MemoryFormat.CHANNELS_LAST: torch.channels_last,
}


class Part(NamedTuple):
    """One array in a workspace buffer: contiguous, starting at a multiple of ``ALIGNMENT_BYTES``."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def carved_bytes(parts: Sequence[Part]) -> int:
    """Return the size in bytes of the smallest buffer that ``carve`` can divide into these arrays."""
    *before, last = parts or (Part((0,), torch.uint8),)
    return sum(_aligned(part.size_bytes) for part in before) + last.size_bytes


def carve(buffer: Tensor, parts: Sequence[Part]) -> list[Tensor]:
    """Divide ``buffer`` (1-D uint8, aligned) into arrays, and return a view of each ``Part``.

    >>> [tuple(view.shape) for view in carve(torch.zeros(128, dtype=torch.uint8), [Part((2, 3), torch.float32)])]
    [(2, 3)]
    """
    views = []
    start = 0
    for part in parts:
        views.append(buffer[start : start + part.size_bytes].view(part.dtype).view(part.shape))
        start += _aligned(part.size_bytes)
    return views


def torch_dtype(problem: ConvProblem) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, problem.dtype)
    return dtype


def compute_dtype(problem: ConvProblem) -> torch.dtype:
    """Return the dtype in which to compute: the problem's, or float32 if the problem's dtype has lower precision."""
    return torch.promote_types(torch_dtype(problem), torch.float32)


def empty_activation(problem: ConvProblem, shape: tuple[int, int, int, int], device_type: str = "cpu") -> Tensor:
    """Return an uninitialised tensor in the problem's dtype and memory format; shape: (N, C, H, W)."""
    memory_format = TORCH_FORMATS[problem.memory_format]
    return torch.empty(shape, dtype=torch_dtype(problem), device=device_type, memory_format=memory_format)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def suggests_channels_last(tensor: Tensor) -> bool:
    """Return whether torch regards a tensor as channels_last, by its sizes and strides.

    The function repeats ``suggest_memory_format`` of torch's C++; torch's Python version takes seconds to import.
    """
    if tensor.dim() != 4 or tensor.stride(1) == 0:
        return False
    least = 0
    for axis in (1, 3, 2, 0):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 0 or stride < least or (axis == 0 and least == tensor.stride(1)):
            return False
        least = stride * size if size > 1 else stride
    return True


def inside(offset: int, stride: int, size: int, positions: int) -> tuple[slice, slice]:
    """Return the i in ``range(positions)`` with ``offset + i * stride`` in ``range(size)``, and these sums, as slices.

    >>> inside(-1, 2, 5, 3)  # at -1, 1 and 3: the first is in the padding
    (slice(1, 3, None), slice(1, 4, 2))
    """
    first = min(max(0, -(offset // stride)), positions)
    end = max(first, min(positions, (size - 1 - offset) // stride + 1))
    if first == end:
        return slice(0, 0), slice(0, 0)
    start = offset + first * stride
    return slice(first, end), slice(start, start + (end - first - 1) * stride + 1, stride)
