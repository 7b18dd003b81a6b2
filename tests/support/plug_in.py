"""Algorithms as another package would bring them: one that is right, and one that doubles its result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mucudnn import BaseAlgorithm, ConvProblem
from mucudnn.core.problem import Operation
from mucudnn.kernels.torch_convolution import reference


@dataclass(frozen=True)
class Pointwise(BaseAlgorithm):
    """Forward 1x1 convolutions, of contiguous tensors in float32."""

    name: str = "test/pointwise"
    version: int = 1
    deterministic: bool = True
    device_type: str = "cpu"

    def supports(self, problem: ConvProblem) -> str | None:
        plain = ConvProblem(Operation.FORWARD, problem.c, problem.h, problem.w, problem.k, 1, 1)
        return None if problem == plain else "only plain forward 1x1 convolutions in float32 are offered"

    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *rest: Tensor) -> None:
        matrix = w.view(problem.k, problem.c).expand(len(x), -1, -1)
        y.flatten(2).baddbmm_(matrix, x.flatten(2), beta=0)
        if bias is not None:
            y.add_(bias.view(-1, 1, 1))


@dataclass(frozen=True)
class Doubling(Pointwise):
    """Wrong: twice the convolution."""

    name: str = "test/doubling"

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 2**20

    def step(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *_: Tensor) -> None:
        y.copy_(2 * reference(problem, x, w, y, bias))
