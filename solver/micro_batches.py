"""The micro-batches of a configuration, found again from its algorithms and its largest scratch."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from mucudnn.solver.costs import Costs, FloatArray, IntArray

Part = tuple[int, int]  # algorithm number, micro-batch size


def fastest_micro_batches(costs: Costs, n: int, algorithms: Collection[int], scratch_bytes: int) -> list[Part]:
    """Return the micro-batches that cover ``n`` samples in the least sum of steps, in running order.

    They use ``algorithms`` and at most ``scratch_bytes``. Ties: fewer micro-batches, then by name, then larger
    micro-batches first. Such a cover must exist.
    """
    allowed = sorted(algorithms)
    fits = costs.scratch_bytes[allowed, : n + 1] <= scratch_bytes
    step_ps = np.where(fits, costs.step_ps[allowed, : n + 1], np.inf)
    least_ps, least_at = step_ps.min(axis=0), step_ps.argmin(axis=0)  # argmin: the first name where names tie
    sizes = np.flatnonzero(np.isfinite(least_ps))
    # One number orders by time, then by how many: a micro-batch counts 1, a picosecond more than n of them.
    costs_of_sizes = least_ps[sizes] * 2.0 ** n.bit_length() + 1
    table = _least_costs(n, sizes, costs_of_sizes)
    parts = []
    while n > 0:
        reach = sizes <= n
        tied = sizes[reach][table[n - sizes[reach]] + costs_of_sizes[reach] == table[n]]
        algorithm, negative_size = min((int(least_at[size]), -int(size)) for size in tied)
        parts.append((allowed[algorithm], -negative_size))
        n += negative_size
    return parts


def _least_costs(n: int, sizes: IntArray, costs_of_sizes: FloatArray) -> FloatArray:
    """T[i] = min over sizes of T[i - size] + cost, for i in 0..n; sizes ascend."""
    table = np.full(n + 1, np.inf)
    table[0] = 0
    ends = np.searchsorted(sizes, np.arange(n + 1), side="right").tolist()
    for i in range(1, n + 1):
        if ends[i]:
            table[i] = (table[i - sizes[: ends[i]]] + costs_of_sizes[: ends[i]]).min()
    return table
