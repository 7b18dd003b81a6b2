"""An algorithm out of one backend of Winograd, whichever ``Winograd`` itself would take."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.kernels.winograd.algorithms import WinogradBackend
from mucudnn.kernels.winograd.cook_toom import CookToom
from mucudnn.words.problem import ConvProblem, Operation


@dataclass(frozen=True)
class OnBackend:
    """F(m x m, r x r) of one backend, as an algorithm that ``Call`` runs."""

    backend: WinogradBackend
    matrices: CookToom

    def workspace(self, problem: ConvProblem, n: int) -> Workspace:
        return self.backend.workspace(self.matrices, problem, n)

    def internal_bytes(self, problem: ConvProblem, n: int) -> int:
        return 0

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            prepared.zero_()
        else:
            self.backend.transform_filter(self.matrices, problem, w, prepared)

    def step(
        self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, *buffers: Tensor
    ) -> None:
        match problem.operation:
            case Operation.FORWARD:
                self.backend.correlate(self.matrices, problem, x, y, bias, *buffers)
            case Operation.BACKWARD_DATA:
                self.backend.correlate(self.matrices, problem, y, x, None, *buffers)
            case Operation.BACKWARD_FILTER:
                self.backend.accumulate(self.matrices, problem, x, y, *buffers)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            self.backend.fold(self.matrices, problem, w, prepared)
