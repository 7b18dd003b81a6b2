"""Random operands of a convolution (the tensors x, w and y) for measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod, sqrt

import torch
from torch import Tensor

from mucudnn.core.problem import MOST_ELEMENTS, ConvProblem, Operation
from mucudnn.core.values import whole
from mucudnn.kernels.memory import dense_strides, torch_dtype

Shape = tuple[int, ...]
_WRITTEN = {Operation.FORWARD: "y", Operation.BACKWARD_DATA: "x", Operation.BACKWARD_FILTER: "w"}


@dataclass(frozen=True, slots=True)
class Operands:
    """Tensors x, w and y of the problem's shapes, dense in its memory format."""

    x: Tensor
    w: Tensor
    y: Tensor

    @property
    def batch_size(self) -> int:
        return self.x.shape[0]

    def slices(self, micro_batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """Return slices (x[i:j], y[i:j]) for all whole micro-batches of the mini-batch, in order."""
        starts = range(0, self.batch_size - micro_batch_size + 1, micro_batch_size)
        return [(self.x[i : i + micro_batch_size], self.y[i : i + micro_batch_size]) for i in starts]

    def first(self, n: int) -> Operands:
        """Return the operands of the first ``n`` samples (views)."""
        return Operands(self.x[:n], self.w, self.y[:n])

    def written(self, operation: Operation) -> Tensor:
        """Return the tensor (x, w or y) that the operation writes."""
        tensor: Tensor = getattr(self, _WRITTEN[operation])
        return tensor


_PERIOD = 2**20 - 3  # a prime, so that rows, channels and samples differ


def random_operands(
    problem: ConvProblem, batch_size: int, device: str = "cpu", seed: int = 0, written: Tensor | None = None
) -> Operands:
    """Return operands of normal random numbers: zeros would draw less power, so their times could be too short.

    x and y have variance 1, and w is scaled so that a convolution preserves it. Torch's global generator keeps its
    state. Besides the three tensors, only ``_PERIOD`` cached numbers are allocated.

    written: memory (1-D uint8) for the tensor that the operation writes; its content is unchanged.

    >>> from mucudnn.core.problem import ConvProblem, Operation
    >>> operands = random_operands(ConvProblem(Operation.FORWARD, c=3, h=8, w=8, k=4, r=3, s=3), batch_size=2)
    >>> tuple(operands.x.shape), tuple(operands.w.shape), tuple(operands.y.shape)
    ((2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 6, 6))
    """
    drawn = _drawn(device, seed)

    def tensor(writer: Operation, shape: Shape, first: int, scale: float = 1.0) -> Tensor:
        """Return the operand that the operation ``writer`` writes, filled with drawn numbers from index ``first``."""
        if written is not None and problem.operation is writer:
            return _stored(problem, shape, written.view(torch_dtype(problem)))
        values = torch.empty(prod(shape), dtype=torch_dtype(problem), device=device)
        _fill(values, drawn, first)
        if scale != 1:
            values.mul_(scale)
        return _stored(problem, shape, values)

    fan_in = prod(problem.w_shape()[1:])
    return Operands(
        x=tensor(Operation.BACKWARD_DATA, problem.x_shape(batch_size), 0),
        w=tensor(Operation.BACKWARD_FILTER, problem.w_shape(), _PERIOD // 3, 1 / sqrt(fan_in)),
        y=tensor(Operation.FORWARD, problem.y_shape(batch_size), 2 * _PERIOD // 3),
    )


@lru_cache(maxsize=2)
def _drawn(device: str, seed: int) -> Tensor:
    """Return ``_PERIOD`` normal random numbers in float32 to copy from: drawing them anew takes ten times as long."""
    with torch.inference_mode(False):
        generator = torch.Generator(device).manual_seed(seed)
        return torch.empty(_PERIOD, device=device).normal_(generator=generator)


def _fill(values: Tensor, drawn: Tensor, first: int) -> None:
    """Fill ``values`` with the drawn numbers from index ``first`` on, wrapping around at the end."""
    done = 0
    while done < len(values):
        piece = drawn[first : first + len(values) - done]
        values[done : done + len(piece)].copy_(piece)
        done, first = done + len(piece), 0


def input_shape(n: int, sample: Sequence[int]) -> tuple[int, ...]:
    """Return the shape (N, C, H, W) of a model's input. Raises ``InvalidInputError`` for more than ``MOST_ELEMENTS``.

    >>> input_shape(32, (3, 224, 224))
    (32, 3, 224, 224)
    """
    whole(n, f"batch, of samples of {'x'.join(map(str, sample))},", 1, MOST_ELEMENTS // prod(sample))
    return n, *sample


def written_shape(problem: ConvProblem, n: int) -> Shape:
    """Return the shape of the tensor that the operation writes for ``n`` samples."""
    match problem.operation:
        case Operation.FORWARD:
            return problem.y_shape(n)
        case Operation.BACKWARD_DATA:
            return problem.x_shape(n)
        case Operation.BACKWARD_FILTER:
            return problem.w_shape()


def operand_bytes(problem: ConvProblem, n: int) -> int:
    """Return the bytes of x, w and y together, for ``n`` samples.

    >>> from mucudnn.core.problem import ConvProblem, Operation
    >>> operand_bytes(ConvProblem(Operation.FORWARD, c=3, h=8, w=8, k=4, r=3, s=3), 1)  # 4 x (192 + 108 + 144)
    1776
    """
    return problem.item_bytes * sum(map(prod, (problem.x_shape(n), problem.w_shape(), problem.y_shape(n))))


def _stored(problem: ConvProblem, shape: Shape, values: Tensor) -> Tensor:
    """Return a tensor (N, C, ...) with these values, laid out in memory in the problem's format."""
    return values.as_strided(shape, dense_strides(shape, problem.memory_format))
