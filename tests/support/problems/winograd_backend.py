"""Geometries at which Winograd's tiles may go wrong, and an algorithm out of one backend, whichever is preferred."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.kernels.winograd.algorithms import WinogradBackend
from mucudnn.kernels.winograd.cook_toom import CookToom
from mucudnn.words.problem import ConvProblem, Operation


def awkward_geometries(m: int, r: int, stride: int = 1) -> Iterator[dict[str, Any]]:
    """Yield arguments of a ``ConvProblem`` for F(m x m, r x r).

    Beyond a padding of r - 1, BACKWARD_DATA crops dy, and whole tiles of the output see nothing but padding.
    """
    few = {"c": 3, "k": 4, "r": r, "s": r, "stride": (stride, stride), "dtype": "float64"}
    for extra in range(stride * m + 1):  # every remainder of the last tile
        yield few | {"h": stride * m + r + extra, "w": 2 * stride * m + r - extra}
    for padding in ((0, 1), (1, 2), (2, 3), (3, 0), (9, 7)):
        yield few | {"h": 7, "w": 6, "padding": padding}
    for h, w in ((1, 1), (1, 9), (2, 1), (3, 3)):  # maps smaller than a tile
        yield few | {"h": h, "w": w, "padding": (r // 2, r // 2)}
    for c, k, groups in ((4, 6, 2), (3, 3, 3), (2, 8, 2), (5, 1, 1)):
        yield few | {"h": 8, "w": 7, "padding": (1, 1), "c": c, "k": k, "groups": groups}


@dataclass(frozen=True)
class OnBackend:
    """F(m x m, r x r) of one backend, as an algorithm that ``Call`` runs."""

    backend: WinogradBackend
    matrices: CookToom

    def workspace(self, problem: ConvProblem, n: int) -> Workspace:
        return self.backend.workspace(self.matrices, problem, n)

    def fuses(self, problem: ConvProblem) -> bool:
        return False

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
