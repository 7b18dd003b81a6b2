"""The rate at which a device multiplies matrices: no direct product is faster."""

from __future__ import annotations

from functools import cache
from math import inf

import torch

from mucudnn.bench.timing.timer import WallClock

_SIDE = 768
_RUNS = 5


def peak_flops_per_s(device: str, dtype: str) -> float:
    """Return the best rate of a square matrix product of torch, in additions and multiplications a second.

    Infinite on devices and for dtypes of which that says nothing: a GPU has several units that multiply, and half
    precision is multiplied by units that not all products can use.
    """
    if device != "cpu" or dtype not in ("float32", "float64"):
        return inf
    return _measured(dtype, torch.get_num_threads())


@cache
def _measured(dtype: str, threads: int) -> float:
    """Measure it once. threads: part of the key."""
    with torch.inference_mode():
        random = torch.Generator().manual_seed(0)  # arithmetic on equal numbers draws less power, and may run faster
        matrix = torch.empty(_SIDE, _SIDE, dtype=getattr(torch, dtype)).normal_(generator=random)
        product, clock = torch.empty_like(matrix), WallClock()
        best_s = min(clock.time(lambda: torch.mm(matrix, matrix, out=product), 1) for _ in range(_RUNS))
    return 2 * _SIDE**3 / best_s
