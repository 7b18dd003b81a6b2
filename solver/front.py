"""The desirable sets of one problem: exact Pareto fronts of time and workspace, for every batch size at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.records import Configuration, Measurement
from mucudnn.solver.costs import PICOSECONDS, Costs, FloatArray, IntArray, pool
from mucudnn.solver.sweep import AlgorithmSet, ConfigurationColumns, sweep

Part = tuple[int, int]  # algorithm number, micro-batch size


def fastest_micro_batches(costs: Costs, n: int, algorithms: Collection[int], scratch_bytes: int) -> list[Part]:
    """Return the micro-batches that cover ``n`` samples with the least sum of step times, in running order.

    The micro-batches use only ``algorithms``, and at most ``scratch_bytes`` of scratch. Ties: fewer micro-batches, then
    by name, then larger micro-batches first. The caller must ensure that ``n`` samples can be covered.
    """
    allowed = sorted(algorithms)
    fits = costs.scratch_bytes[allowed, : n + 1] <= scratch_bytes
    step_ps = np.where(fits, costs.step_ps[allowed, : n + 1], np.inf)
    least_ps, least_at = step_ps.min(axis=0), step_ps.argmin(axis=0)  # argmin breaks ties by the first name
    sizes = np.flatnonzero(np.isfinite(least_ps))
    # One number orders by time, then by number of micro-batches: one picosecond outweighs n micro-batches.
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
    """Return the least cost of covering i samples, T[i] = min over sizes of T[i - size] + cost, for i in 0..n.

    sizes: ascending.
    """
    table = np.full(n + 1, np.inf)
    table[0] = 0
    ends = np.searchsorted(sizes, np.arange(n + 1), side="right").tolist()
    for i in range(1, n + 1):
        if ends[i]:
            table[i] = (table[i - sizes[: ends[i]]] + costs_of_sizes[: ends[i]]).min()
    return table


@dataclass(frozen=True, slots=True, eq=False)
class DesirableSets:
    """The desirable set (Pareto front of time and workspace) of every batch size from 1 to ``batch_size``.

    Configurations are built on demand. Every method raises ``InvalidInputError`` if its ``n`` is not in 1..batch_size.
    """

    batch_size: int
    _costs: Costs
    _sets: tuple[AlgorithmSet, ...]
    _front: ConfigurationColumns  # Sorted by n, then workspace; a point has several rows if sets tie.

    def of(self, n: int) -> tuple[Configuration, ...]:
        """Return the desirable configurations for ``n`` samples, from the least workspace to the fastest.

        The result is empty if no micro-batch sizes add up to n.
        """
        return tuple(self._configuration(n, point) for point in self._points(n))

    def size(self, n: int) -> int:
        """Return the number of configurations in the desirable set (Pareto front) of ``n`` samples."""
        return len(self._points(n))

    def smallest(self, n: int) -> Configuration | None:
        """Return the configuration with the least workspace for ``n`` samples; None if no configuration covers n."""
        points = self._points(n)
        return self._configuration(n, points[0]) if points else None

    def fastest(self, n: int, limit_bytes: int | None = None) -> Configuration | None:
        """Return the fastest configuration for ``n`` samples within ``limit_bytes`` of workspace; None if none fits."""
        workspace = self._front.workspace_bytes
        fitting = [p for p in self._points(n) if limit_bytes is None or workspace[p.start] <= limit_bytes]
        return self._configuration(n, fitting[-1]) if fitting else None

    def fastest_s(self, limit_bytes: int | None = None) -> FloatArray:
        """Return the seconds of the fastest configuration for each n from 0 to ``batch_size``: (batch_size + 1,).

        Only configurations within ``limit_bytes`` of workspace count; the time is infinite if none fits.
        """
        front = self._front
        fits = slice(None) if limit_bytes is None else front.workspace_bytes <= limit_bytes
        times_ps = np.full(self.batch_size + 1, np.inf)
        times_ps[0] = 0
        np.minimum.at(times_ps, front.n[fits], front.time_ps[fits])
        seconds: FloatArray = times_ps / PICOSECONDS
        return seconds

    def _points(self, n: int) -> list[range]:
        """Return, for each point of the Pareto front of ``n`` samples, the range of its rows in the table."""
        if not 1 <= n <= self.batch_size:
            raise InvalidInputError(f"batch size is {n}; these desirable sets cover 1 to {self.batch_size}")
        first, last = np.searchsorted(self._front.n, [n, n + 1]).tolist()
        starts = first + np.flatnonzero(np.diff(self._front.workspace_bytes[first:last], prepend=-1))
        return [range(*ends) for ends in zip(starts.tolist(), [*starts[1:].tolist(), last], strict=False)]

    def _configuration(self, n: int, point: range) -> Configuration:
        """Build the configuration of a point of the front for ``n`` samples.

        Ties: fewer micro-batches, then by name, then larger micro-batches first.
        """
        covers = [self._cover(n, row) for row in point]
        return self._costs.configuration(min(covers, key=lambda cover: (len(cover), [(a, -b) for a, b in cover])))

    def _cover(self, n: int, row: int) -> list[Part]:
        algorithms = self._sets[int(self._front.set_number[row])]
        scratch_bytes = int(self._front.workspace_bytes[row]) - self._costs.prepared_of(algorithms)
        return fastest_micro_batches(self._costs, n, algorithms | self._costs.free_algorithms, scratch_bytes)


def desirable_sets(measurements: Sequence[Measurement], batch_size: int) -> DesirableSets:
    """Find the exact desirable sets of the batch sizes 1..batch_size from the measurements of one problem.

    Raises ``InvalidInputError`` if ``batch_size`` is below 1 or a measurement is negative or not finite.
    """
    costs = pool(measurements, batch_size)
    sets = _small_sets(costs)
    found = sweep(costs, sets)
    larger = _larger_sets(sets, found)
    if larger:
        sets = [*sets, *larger]
        found = sweep(costs, sets)
    return DesirableSets(batch_size, costs, tuple(sets), _pareto(found))


def _small_sets(costs: Costs) -> list[AlgorithmSet]:
    """Return the sets with at most two algorithms, not counting those without setup time and prepared bytes."""
    paid = sorted(frozenset(range(len(costs.names))) - costs.free_algorithms)
    return [frozenset(members) for size in range(3) for members in combinations(paid, size)]


def _larger_sets(sets: Sequence[AlgorithmSet], found: ConfigurationColumns) -> list[AlgorithmSet]:
    """Return the sets of three or more algorithms in which the sweep found every pair useful; no others can matter.

    If the sweep finds nothing for a pair, another set covers the same samples with no more scratch in less time, or in
    the same time with fewer prepared bytes. That set can replace the pair in any larger configuration, which is
    therefore not in the desirable set.
    """
    pairs = {sets[i] for i in np.unique(found.set_number) if len(sets[i]) == 2}
    larger: list[AlgorithmSet] = []
    cliques = pairs
    while cliques:
        cliques = {
            clique | {new}
            for clique in cliques
            for new in frozenset[int]().union(*pairs) - clique
            if all(frozenset({new, member}) in pairs for member in clique)
        }
        larger += sorted(cliques, key=sorted)
    return larger


def _pareto(found: ConfigurationColumns) -> ConfigurationColumns:
    """Keep the Pareto front of each n.

    A configuration is kept if it is faster than all with less workspace, and no slower than any with the same
    workspace.
    """
    found = found.take(np.lexsort((found.time_ps, found.workspace_bytes, found.n)))
    times, rank = np.unique(found.time_ps, return_inverse=True)
    key = rank - found.n * (times.size + 1)  # decreases from one n to the next, so that one running minimum serves all
    new_point = (np.diff(found.n, prepend=-1) != 0) | (np.diff(found.workspace_bytes, prepend=-1) != 0)
    least = key[new_point]
    least_before = np.minimum.accumulate(np.concatenate([[1], least[:-1]]))
    point = np.cumsum(new_point) - 1
    return found.take(np.flatnonzero((key == least[point]) & (least < least_before)[point]))
