"""1x1 convolutions as one matrix product a sample, read and written in place: no workspace at all.

With P = H*W pixels a sample of x is a matrix (C, P) as it lies in memory, one of y is (K, P), and the filter is (K, C):

    forward y = W x        backward data x = W^T y        backward filter W += sum over the samples of y x^T
"""

from __future__ import annotations

from torch import Tensor

from mucudnn import BaseAlgorithm, ConvProblem, MemoryFormat, Operation


class Pointwise(BaseAlgorithm):
    """What ``BaseAlgorithm`` answers already is left out: it takes slices of any size, and is handed no workspace."""

    name = "own/pointwise"  # package/name; databases keep it for ever
    version = 1  # raise it when speed, workspace or rounding change: what is stored is then measured again
    deterministic = True  # equal operands give equal bits

    def supports(self, problem: ConvProblem) -> str | None:
        """Return None, or a sentence that says why not."""
        if (problem.r, problem.s, problem.stride, problem.padding) != (1, 1, (1, 1), (0, 0)):
            return "only 1x1 filters with stride 1 and without padding are one matrix product"
        if problem.groups != 1:
            return f"groups is {problem.groups}; only convolutions without groups are offered"
        if problem.memory_format is not MemoryFormat.CONTIGUOUS:
            return (
                f"the memory format is {problem.memory_format}; a sample is a matrix (C, P) only in contiguous tensors"
            )
        if problem.item_bytes < 4:
            return f"dtype is {problem.dtype}; micro-batches must be summed in float32 at least"
        return None

    def is_local(self, problem: ConvProblem) -> bool:
        """Return True: a NaN spoils what it is multiplied with, and nothing else."""
        return True

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        """Compute one micro-batch. x: (n, C, H, W), w: (K, C, 1, 1), y: (n, K, H, W), bias: (K,)."""
        xs, ys, matrix = x.flatten(2), y.flatten(2), w.view(problem.k, problem.c)  # views
        match problem.operation:
            case Operation.FORWARD:
                ys.baddbmm_(matrix.expand(len(x), -1, -1), xs, beta=0)
                if bias is not None:
                    y.add_(bias.view(-1, 1, 1))
            case Operation.BACKWARD_DATA:
                xs.baddbmm_(matrix.t().expand(len(x), -1, -1), ys, beta=0)
            case Operation.BACKWARD_FILTER:
                matrix.addbmm_(ys, xs.transpose(1, 2))


ALGORITHM = Pointwise()
