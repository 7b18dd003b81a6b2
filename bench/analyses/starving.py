"""The batch size below which a device starves: falls under most of its best throughput."""

from __future__ import annotations

from collections.abc import Mapping

ENOUGH = 0.8  # of the best throughput: below it, the device starves


def starving_below(seconds: Mapping[int, float]) -> int:
    """Return the least of the batch sizes from which on a device has ``ENOUGH`` of its best throughput.

    seconds: of that many samples; at least of one size.

    >>> starving_below({1: 4.0, 2: 4.0, 4: 4.0, 8: 6.0})  # 0.25, 0.5, 1 and 1.33 samples a second
    8
    """
    throughput = {n: n / seconds[n] for n in sorted(seconds)}
    starved = [n for n, reached in throughput.items() if reached < ENOUGH * max(throughput.values())]
    least = max(starved, default=0) + 1
    return min((n for n in throughput if n >= least), default=least)
