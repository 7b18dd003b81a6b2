"""The rates at which a device multiplies matrices and copies memory: no direct product or pass over it is faster."""

from __future__ import annotations

from functools import cache
from math import inf

import torch

from mucudnn.bench.timing.timer import WallClock

_SIDE = 768
_RUNS = 5
_COPIED_BYTES = 64 * 2**20  # more than caches hold


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


def copied_bytes_per_s(device: str) -> float:
    """Return the best rate of copies, of bytes read and bytes written together. Infinite where it is not measured."""
    return _copies(torch.get_num_threads()) if device == "cpu" else inf


@cache
def _copies(threads: int) -> float:
    """Measure it once. threads: part of the key."""
    with torch.inference_mode():
        source = torch.ones(_COPIED_BYTES // 4)
        target, clock = torch.zeros_like(source), WallClock()
        best_s = min(clock.time(lambda: target.copy_(source), 1) for _ in range(_RUNS))
    return 2 * _COPIED_BYTES / best_s
