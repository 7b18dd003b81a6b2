"""The three tensors of a convolution, filled with random numbers: what every measurement runs on."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from mucudnn.kernels.buffers import TORCH_FORMATS
from mucudnn.problem import ConvProblem


@dataclass(frozen=True, slots=True)
class Operands:
    """x: (N, C, H, W), w: (K, C // groups, R, S), y: (N, K, P, Q), dense in the problem's memory format."""

    x: Tensor
    w: Tensor
    y: Tensor

    @property
    def batch_size(self) -> int:
        return self.x.shape[0]

    def slices(self, micro_batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """(x[i:j], y[i:j]) of all whole micro-batches, in order."""
        starts = range(0, self.batch_size - micro_batch_size + 1, micro_batch_size)
        return [(self.x[i : i + micro_batch_size], self.y[i : i + micro_batch_size]) for i in starts]

    def first(self, n: int) -> Operands:
        """The first ``n`` samples (views)."""
        return Operands(self.x[:n], self.w, self.y[:n])


def random_operands(problem: ConvProblem, batch_size: int, device: str = "cpu", seed: int = 0) -> Operands:
    """Normal random numbers, never zeros (arithmetic on zeros draws less power, so it can run faster than real data).

    x and y have variance 1, and w is scaled so that a convolution keeps it. The state of torch's global generator is
    left alone.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(scale)
        return values.to(getattr(torch, problem.dtype), memory_format=TORCH_FORMATS[problem.memory_format])

    fan_in = problem.c // problem.groups * problem.r * problem.s
    return Operands(
        x=random(problem.x_shape(batch_size)),
        w=random(problem.w_shape(), 1 / sqrt(fan_in)),
        y=random(problem.y_shape(batch_size)),
    )
