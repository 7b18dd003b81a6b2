"""Geometries at which Winograd's tiles may go wrong, and CUDA's Winograd with any launcher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mucudnn.core.problem import ConvProblem
from mucudnn.kernels.winograd.cuda import CudaWinograd


def awkward_geometries(m: int, r: int, stride: int = 1) -> Iterator[dict[str, Any]]:
    """Yield arguments of a ``ConvProblem`` for F(m x m, r x r).

    Beyond a padding of r - 1, BACKWARD_DATA crops dy, and whole tiles of the output see nothing but padding.
    """
    few = {"c": 3, "k": 4, "r": r, "s": r, "stride": (stride, stride)}
    for extra in range(stride * m + 1):  # every remainder of the last tile
        yield few | {"h": stride * m + r + extra, "w": 2 * stride * m + r - extra}
    for padding in ((0, 1), (1, 2), (2, 3), (3, 0), (9, 7)):
        yield few | {"h": 7, "w": 6, "padding": padding}
    for h, w in ((1, 1), (1, 9), (2, 1), (3, 3)):  # maps smaller than a tile
        yield few | {"h": h, "w": w, "padding": (r // 2, r // 2)}
    for c, k, groups in ((4, 6, 2), (3, 3, 3), (2, 8, 2), (5, 1, 1)):
        yield few | {"h": 8, "w": 7, "padding": (1, 1), "c": c, "k": k, "groups": groups}


class WithoutCublas(CudaWinograd):
    """CUDA's Winograd where cuBLAS's workspace is not counted."""

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0
