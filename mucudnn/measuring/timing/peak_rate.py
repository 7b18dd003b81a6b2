"""Peak rates at which a device multiplies matrices and copies memory: upper bounds for computation and copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import inf

import torch

from mucudnn.measuring.timing.timer import WallClock

_SIDE = 768
_COPIED_BYTES = 64 * 2**20  # larger than any cache
_FEWEST_RUNS = 5
_QUICK_LOOKS = 10
_QUICK_S, _THOROUGH_S = 0.05, 0.5  # clock rates vary: a longer probe is likelier to see the peak

_seen_flops_per_s: defaultdict[tuple[str, int], list[float]] = defaultdict(list)  # by dtype and number of threads


def peak_flops_per_s(device: str, dtype: str) -> float:
    """Return the best rate of torch's square matrix product, in FLOP/s (additions and multiplications).

    The product is timed briefly in the first ``_QUICK_LOOKS`` calls per process, and the best rate counts, since load
    can halve the rate. The rate is infinite where a matrix product is no upper bound: on a GPU, which has several kinds
    of multipliers, and for half precision, whose multipliers not all products can use.
    """
    if not _is_bound(device, dtype):
        return inf
    seen = _seen_flops_per_s[dtype, torch.get_num_threads()]
    if len(seen) < _QUICK_LOOKS:
        seen.append(_flops_per_s(dtype, _QUICK_S))
    return max(seen)


def sustained_flops_per_s(device: str, dtype: str) -> float:
    """Measure matrix products for half a second and return the best rate in FLOP/s; inf where it is no upper bound."""
    return _flops_per_s(dtype, _THOROUGH_S) if _is_bound(device, dtype) else inf


def copied_bytes_per_s(device: str) -> float:
    """Measure copies for half a second and return the best rate in bytes/s, counting both reads and writes.

    The rate is infinite on devices where copies are not measured.
    """
    if device != "cpu":
        return inf
    with torch.inference_mode():
        source = torch.ones(_COPIED_BYTES // 4)
        target = torch.zeros_like(source)
        return 2 * _COPIED_BYTES / _best_s(lambda: target.copy_(source), _THOROUGH_S)


def _is_bound(device: str, dtype: str) -> bool:
    return device == "cpu" and dtype in ("float32", "float64")


def _flops_per_s(dtype: str, least_s: float) -> float:
    with torch.inference_mode():
        random = torch.Generator().manual_seed(0)  # arithmetic on constant data draws less power and may run faster
        matrix = torch.empty(_SIDE, _SIDE, dtype=getattr(torch, dtype)).normal_(generator=random)
        product = torch.empty_like(matrix)
        return 2 * _SIDE**3 / _best_s(lambda: torch.mm(matrix, matrix, out=product), least_s)


def _best_s(call: Callable[[], object], least_s: float) -> float:
    """Repeat a call for at least ``least_s`` seconds in total, and return the seconds of the fastest call."""
    clock, times_s = WallClock(), list[float]()
    while len(times_s) < _FEWEST_RUNS or sum(times_s) < least_s:
        times_s.append(clock.time(call, 1))
    return min(times_s)
