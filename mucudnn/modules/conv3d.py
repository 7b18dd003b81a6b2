"""The drop-in for ``torch.nn.Conv3d``, and its operators: torch's own convolution in micro-batches, to save memory.

The memory that libraries allocate inside a convolution grows with the batch: im2col matrices, copies in another format.
If the batch is computed in slices (micro-batches), libraries need only the memory for one slice. y and dx are written
slice by slice; dw is summed in at least float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mucudnn.kernels.contract.buffers import suggests_channels_last
from mucudnn.kernels.torch_ops.torch_convolution import torch_convolution
from mucudnn.modules.tuned_module import TunedClass, are_tuples, operator_takes, padded
from mucudnn.running.definition import define_convolution
from mucudnn.words.problem import Operation
from mucudnn.words.units import format_bytes

UNDIVIDED = 0


@dataclass(frozen=True, slots=True)
class DividedOperation:
    """One operation of an ``nn.Conv3d`` and its micro-batch size. Bytes do not include the result.

    x_shape: (N, C, D, H, W), including padding that torch adds first. micro_batch_size: samples in a slice, or
    ``UNDIVIDED``. undivided_bytes: allocated inside torch's convolution of the whole batch. divided_bytes: allocated
    inside torch's convolution if it runs in slices.
    """

    operation: Operation
    x_shape: tuple[int, ...]
    micro_batch_size: int
    undivided_bytes: int
    divided_bytes: int
    reason: str = ""

    def __str__(self) -> str:
        """Return a text such as ``forward 8x16x32x64x64: 2 of 8 samples at a time, 12 MiB instead of 48 MiB``."""
        n, *sample = self.x_shape
        what = f"{self.operation} {n}x{'x'.join(map(str, sample))}"
        if self.micro_batch_size == UNDIVIDED:
            return f"{what}: torch's own, undivided, {format_bytes(self.undivided_bytes)}; {self.reason}"
        sizes = f"{format_bytes(self.divided_bytes)} instead of {format_bytes(self.undivided_bytes)}"
        return f"{what}: {self.micro_batch_size} of {n} samples at a time, {sizes}; {self.reason}"


class Conv3d(TunedClass, torch.nn.Conv3d):
    """A ``torch.nn.Conv3d``: same arguments, same state dict, same result.

    For tuned sizes at which torch's convolution needs more memory than the limit, it runs in micro-batches; for all
    other sizes, undivided. ``divided`` has the micro-batch sizes with reasons. x: (N, C, D, H, W) or (C, D, H, W), y:
    (N, K, O, P, Q) or (K, O, P, Q).

    >>> import torch, mucudnn
    >>> layer = mucudnn.Conv3d(in_channels=3, out_channels=8, kernel_size=3, stride=2, padding=1)
    >>> layer(torch.zeros(4, 3, 8, 32, 48)).shape  # (N, C, D, H, W) -> (N, K, O, P, Q)
    torch.Size([4, 8, 4, 16, 24])
    """

    _untuned_class = torch.nn.Conv3d

    divided: tuple[DividedOperation, ...] = ()

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self._divided_forward(input, weight, bias) if self.divided else None
        return super()._conv_forward(input, weight, bias) if y is None else y

    def _divided_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return y, computed in micro-batches; None if torch's undivided one is to run, which also reports errors."""
        if not operator_takes(x, weight, (5, 5)) or not are_tuples(self.stride, self.dilation, length=3):
            return None
        x, padding = padded(self, x, weight)
        sizes = self._micro_batch_sizes(x)
        if not any(sizes) or not are_tuples(padding, length=3):
            return None
        return OPERATORS[Operation.FORWARD](x, weight, bias, self.stride, padding, self.dilation, self.groups, sizes)

    def _micro_batch_sizes(self, x: Tensor) -> list[int]:
        """Return the micro-batch sizes for y, dx and dw, which depend on the shape of a sample, not on N."""
        of_this_size = {one.operation: one.micro_batch_size for one in self.divided if one.x_shape[1:] == x.shape[1:]}
        return [of_this_size.get(operation, UNDIVIDED) for operation in Operation]


def _divided(operation: Operation, x: Tensor, w: Tensor, third: Tensor | None, *rest: Any) -> Tensor:
    """Compute y, dx or dw in micro-batches. rest: geometry, then the micro-batch sizes of all three operations."""
    *geometry, sizes = rest
    size = sizes[tuple(Operation).index(operation)]
    if size <= UNDIVIDED or x.dim() != 5 or len(x) <= size or x.shape[1] != w.shape[1] * geometry[-1]:
        return torch_convolution(operation, x, w, third, geometry)  # which also reports errors

    def computed(part: slice) -> Tensor:
        of_part = third if third is None or operation is Operation.FORWARD else third[part]
        return torch_convolution(operation, x[part], w, of_part, geometry)

    if operation is Operation.BACKWARD_FILTER:
        return _sum(w, map(computed, _slices(len(x), size)))
    written = None
    for part in _slices(len(x), size):
        result = computed(part)
        written = _like(result, len(x)) if written is None else written
        written[part] = result
        del result  # before the next slice
    assert written is not None
    return written


def _slices(n: int, size: int) -> Iterator[slice]:
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _like(result: Tensor, n: int) -> Tensor:
    """Return an empty tensor for ``n`` samples, in the memory format of ``result``, the result of the first samples."""
    memory_format = torch.channels_last_3d if suggests_channels_last(result) else torch.contiguous_format
    return torch.empty((n, *result.shape[1:]), dtype=result.dtype, device=result.device, memory_format=memory_format)


def _sum(w: Tensor, gradients: Iterator[Tensor]) -> Tensor:
    total = None
    for gradient in gradients:
        if total is None:
            total = gradient.to(torch.float32) if gradient.itemsize < 4 else gradient
        else:
            total += gradient
        del gradient  # before the next slice
    assert total is not None
    return total.to(w.dtype)


OPERATORS = define_convolution("conv3d", 3, "int[3] micro_batch_sizes", _divided)
