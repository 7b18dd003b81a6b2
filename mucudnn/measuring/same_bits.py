"""Whether an algorithm computes the same bits of a sample by itself and in a micro-batch of several."""

from __future__ import annotations

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem
from mucudnn.kernels.algorithm import Algorithm
from mucudnn.kernels.memory import aligned_buffer
from mucudnn.measuring.operands import random_operands


def has_same_bits(algorithm: Algorithm, problem: ConvProblem, n: int, device_type: str = "cpu") -> bool:
    """Return whether each of ``n`` samples has the same bits in a micro-batch of all as by itself, at every place.

    problem: FORWARD or BACKWARD_DATA.
    """
    operands = random_operands(problem, n, device_type)

    def values(size: int) -> Tensor:
        needed = algorithm.workspace(problem, size)
        prepared, scratch = (
            aligned_buffer(nbytes, device_type) for nbytes in (needed.prepared_bytes, needed.scratch_bytes)
        )
        algorithm.open(problem, operands.w, prepared)
        for x, y in operands.slices(size):
            algorithm.step(problem, x, operands.w, y, None, prepared, scratch)
        return operands.written(problem.operation).clone()

    return torch.equal(values(n), values(1))
