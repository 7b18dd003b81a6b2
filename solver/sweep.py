"""The sweep that finds the fastest configurations for each workspace: a knapsack for many algorithm sets at once.

T[set, n] is the least sum of step times that covers n samples with the algorithms of the set. Micro-configs (an
algorithm with a micro-batch size) are added in ascending order of their scratch bytes. Each entry that decreases is a
new configuration: its time is the entry plus the set's setup times, its workspace the set's prepared bytes plus the
scratch of the added micro-config.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mucudnn.solver.costs import Costs, FloatArray, IntArray

AlgorithmSet = frozenset[int]  # Numbers of algorithms; the free ones belong to every set and are not listed.


@dataclass(frozen=True, slots=True, eq=False)
class ConfigurationColumns:
    """A table of configurations. In each row, a set of algorithms covers ``n`` samples in this time and workspace."""

    set_number: IntArray
    n: IntArray
    time_ps: FloatArray
    workspace_bytes: IntArray

    def take(self, rows: IntArray) -> ConfigurationColumns:
        return ConfigurationColumns(self.set_number[rows], self.n[rows], self.time_ps[rows], self.workspace_bytes[rows])

    @staticmethod
    def concatenate(parts: Iterable[ConfigurationColumns]) -> ConfigurationColumns:
        whole = [NOTHING, *parts]
        return ConfigurationColumns(
            np.concatenate([part.set_number for part in whole]),
            np.concatenate([part.n for part in whole]),
            np.concatenate([part.time_ps for part in whole]),
            np.concatenate([part.workspace_bytes for part in whole]),
        )


_NO_INTEGERS = np.empty(0, dtype=np.int64)
NOTHING = ConfigurationColumns(_NO_INTEGERS, _NO_INTEGERS, np.empty(0), _NO_INTEGERS)


def sweep(costs: Costs, sets: Sequence[AlgorithmSet]) -> ConfigurationColumns:
    """Return the candidates for the desirable sets (Pareto fronts) of every n, as configurations of ``sets``.

    The candidates include all desirable configurations. The sweep leaves out configurations dominated, at the same
    scratch, by one of the ``sets`` of at most one algorithm that takes less time with no more prepared bytes, or the
    same time with fewer.
    """
    table = _Table(costs, sets)
    return ConfigurationColumns.concatenate(table.add(algorithm, size) for algorithm, size in _by_scratch(costs))


def _by_scratch(costs: Costs) -> list[tuple[int, int]]:
    """Return all measured pairs (algorithm, micro-batch size), least scratch bytes first, then the larger size."""
    algorithms, sizes = np.nonzero(np.isfinite(costs.step_ps))
    order = np.lexsort((algorithms, -sizes, costs.scratch_bytes[algorithms, sizes]))
    return list(zip(algorithms[order].tolist(), sizes[order].tolist(), strict=True))


class _Table:
    """The table T[set, n] of least step times in picoseconds, with the bounds that identify dominated entries."""

    def __init__(self, costs: Costs, sets: Sequence[AlgorithmSet]) -> None:
        self._costs = costs
        self._setup_ps = np.array([costs.setup_of(s) for s in sets])
        self._prepared_bytes = np.array([costs.prepared_of(s) for s in sets], dtype=np.int64)
        self._steps_ps = np.full((len(sets), costs.step_ps.shape[1]), np.inf)
        self._steps_ps[:, 0] = 0
        free = costs.free_algorithms
        self._sets_with = [
            np.array([i for i, s in enumerate(sets) if a in s or a in free], dtype=np.int64)
            for a in range(len(costs.names))
        ]
        self._bounds = _Bounds([i for i, s in enumerate(sets) if len(s) <= 1], self._prepared_bytes, self._steps_ps)

    def add(self, algorithm: int, size: int) -> ConfigurationColumns:
        """Add a pair (algorithm, micro-batch size) to the table, and return the configurations that become faster."""
        step_ps = float(self._costs.step_ps[algorithm, size])
        sets = self._sets_with[algorithm]
        sets = sets[self._steps_ps[sets, size] > step_ps]
        if not sets.size:
            return NOTHING
        before, after = self._relax(sets, size, step_ps)
        time_ps = after + self._setup_ps[sets, None]
        self._bounds.lower(sets, size, time_ps)
        rows, columns = np.nonzero((after < before) & (time_ps < self._bounds.of(sets, size)))
        workspace_bytes = self._prepared_bytes[sets] + self._costs.scratch_bytes[algorithm, size]
        return ConfigurationColumns(sets[rows], columns + size, time_ps[rows, columns], workspace_bytes[rows])

    def _relax(self, sets: IntArray, size: int, step_ps: float) -> tuple[FloatArray, FloatArray]:
        """Update T with any number of micro-batches of this size.

        Return T[sets, size:] before and after the update.
        """
        table = self._steps_ps[sets]
        before = table[:, size:].copy()
        # Allow one more step, then two more, four more, ..., which covers any number of steps.
        while size < table.shape[1]:
            np.minimum(table[:, size:], table[:, :-size] + step_ps, out=table[:, size:])
            size, step_ps = 2 * size, 2 * step_ps
        self._steps_ps[sets] = table
        return before, table[:, -before.shape[1] :]


class _Bounds:
    """The least time so far for each n of the sets of at most one algorithm (*singles*), ordered by prepared bytes."""

    def __init__(self, singles: list[int], prepared_bytes: IntArray, like: FloatArray) -> None:
        singles = sorted(singles, key=lambda single: int(prepared_bytes[single]))
        self._rank = {single: rank for rank, single in enumerate(singles)}
        self._least_ps = np.full(
            (len(singles) + 1, like.shape[1]), np.inf
        )  # Entry [i] is for the i singles with the fewest prepared bytes.
        self._preparing_less = np.searchsorted(prepared_bytes[singles], prepared_bytes, side="left")
        self._preparing_no_more = np.searchsorted(prepared_bytes[singles], prepared_bytes, side="right")

    def lower(self, sets: IntArray, first_n: int, time_ps: FloatArray) -> None:
        """Lower the bounds where the new times of ``sets`` are less, for n from ``first_n`` on."""
        for number, row in zip(sets.tolist(), time_ps, strict=True):
            if number in self._rank:
                least = self._least_ps[self._rank[number] + 1 :, first_n:]
                np.minimum(least, row, out=least)

    def of(self, sets: IntArray, first_n: int) -> FloatArray:
        """Return the least times that are dominated, for each of ``sets`` and each n from ``first_n`` on."""
        less = self._least_ps[self._preparing_less[sets], first_n:]
        no_more = self._least_ps[self._preparing_no_more[sets], first_n:]
        # Times are whole numbers. A tie with equal prepared bytes is kept, because it may need fewer micro-batches.
        bounds: FloatArray = np.minimum(less, no_more + 1)
        return bounds
