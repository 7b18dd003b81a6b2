"""Results in float64 to compare with, as far as they are affordable in time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.measuring.operands import Operands, written_shape
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.torch_settings import computed_without_libraries

_FLOPS = 4e9  # operations in float64: about 0.1 s on two cores
_BYTES = 64 * 2**20  # most for one result, and for one piece of the work
_FEWEST_SAMPLES = 3  # the first, the last and one between, whatever they cost


class ExactResults:
    """Results in float64 for the first samples of some operands, which must not change meanwhile.

    Activations are compared in some of the samples, evenly spread. The gradient of the filter is the sum over all of
    them. Only the last result is kept: candidates come in the order of their size.
    """

    def __init__(self, problem: ConvProblem, operands: Operands) -> None:
        self._problem, self._operands = problem, operands
        self._of: Sequence[int] = ()
        self._result: Tensor | None = None

    @property
    def affordable(self) -> int:
        """The number of samples that can be compared at little cost; 0 if one costs more."""
        samples = min(self._operands.batch_size, int(_FLOPS / self._problem.flops(1)))
        if self._problem.operation is Operation.BACKWARD_FILTER:
            return samples
        return min(samples, _BYTES // (8 * written_elements(self._problem, 1)))

    def compared(self, n: int) -> Sequence[int]:
        """Indices of the samples, among the first ``n``, that are compared, ascending."""
        count = min(n, max(_FEWEST_SAMPLES, self.affordable))
        return range(n) if count == n else [i * (n - 1) // (count - 1) for i in range(count)]

    def result(self, n: int) -> Tensor:
        """The result in float64: dw of the first ``n`` samples; otherwise y or dx of the samples ``compared(n)``."""
        of_filter = self._problem.operation is Operation.BACKWARD_FILTER
        samples = range(n) if of_filter else self.compared(n)
        if self._result is None or list(self._of) != list(samples):
            self._result = self._sum(n) if of_filter else torch.cat(list(self._pieces(samples)))
            self._of = samples
        return self._result

    def error(self, written: Tensor, n: int) -> float:
        """Relative L2 error of what an algorithm wrote for the first ``n`` samples."""
        if self._problem.operation is not Operation.BACKWARD_FILTER:
            written = written[torch.as_tensor(self.compared(n), device=written.device)]
        return relative_l2_error(written, self.result(n))

    def peak_bytes(self) -> int:
        """Most bytes that are allocated at a time, for a mini-batch as large as that of the operands.

        There are four results in float64: the exact one, the algorithm's own, its copy in float64, and their
        difference. Then there are the filter, and one piece of the work: samples as they are and in float64, and
        torch's im2col matrix.
        """
        count = max(len(self.compared(self._operands.batch_size)), self.affordable)
        result = 8 * written_elements(self._problem, count)
        return 4 * result + 8 * _elements(self._problem.w_shape()) + 12 * self._piece() * self._numbers_of_sample()

    def _sum(self, n: int) -> Tensor:
        """dw of the first ``n`` samples. It goes on from the last sum where it can."""
        done = len(self._of) if len(self._of) <= n else 0
        total = self._result if done else None
        for piece in self._pieces(range(done, n)):
            total = piece if total is None else total.add_(piece)
        assert total is not None
        return total

    def _pieces(self, samples: Sequence[int]) -> Iterator[Tensor]:
        """Results of the samples, piece by piece, each small enough for the memory."""
        x, w, y = self._operands.x, self._operands.w, self._operands.y
        for start in range(0, len(samples), self._piece()):
            of_piece = torch.as_tensor(samples[start : start + self._piece()], device=x.device)
            with computed_without_libraries() if x.is_cuda else nullcontext():
                result = reference(self._problem, x[of_piece], w, y[of_piece])
            yield result

    def _piece(self) -> int:
        """Number of samples in a piece."""
        return min(self._operands.batch_size, max(1, _BYTES // (12 * self._numbers_of_sample())))

    def _numbers_of_sample(self) -> int:
        """Number of elements in x, y and the im2col matrix of one sample."""
        problem = self._problem
        columns = problem.c * problem.r * problem.s * problem.p * problem.q
        return _elements(problem.x_shape(1)) + _elements(problem.y_shape(1)) + columns


def written_elements(problem: ConvProblem, n: int) -> int:
    """Number of elements of the tensor that the operation writes for ``n`` samples.

    >>> from mucudnn.words.problem import ConvProblem, Operation
    >>> written_elements(ConvProblem(Operation.FORWARD, c=3, h=8, w=8, k=4, r=3, s=3), 2)  # 2 x 4 x 6 x 6
    288
    """
    return _elements(written_shape(problem, n))


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
