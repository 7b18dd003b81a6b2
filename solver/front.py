"""The desirable sets of one problem: exact Pareto fronts of time and workspace, for every batch size at once.

The cost model of a configuration (algorithms with micro-batch sizes):

    time      = sum over its algorithms of setup  +  sum over its micro-batches of step
    workspace = sum over its algorithms of prepared  +  max over its micro-batches of scratch

Times are whole picoseconds, far below the resolution of a clock, stored as float64. Sums are then exact (up to 2**53
ps, 2.5 hours) and independent of the order, so ties are exact and the order of the input does not matter.

A sweep finds the fastest configurations for each workspace: a knapsack for many algorithm sets at once. T[set, n] is
the least sum of step times that covers n samples with the algorithms of the set. Micro-configs (an algorithm with a
micro-batch size) are added in ascending order of their scratch bytes. Each entry that decreases is a new configuration:
its time is the entry plus the set's setup times, its workspace the set's prepared bytes plus the scratch of the added
micro-config.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.records import Configuration, Measurement, MicroConfig
from mucudnn.core.values import grouped, whole

# The cost model

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]

PICOSECONDS = 1e12  # per second


@dataclass(frozen=True, slots=True, eq=False)
class CostArrays:
    """The measurements of one problem as arrays, repeated ones merged. Algorithms are numbered in order of their names.

    setup_ps: (algorithms,).
    prepared_bytes: (algorithms,).
    step_ps: (algorithms, batch_size + 1), indexed by the micro-batch size; infinite for sizes that were not measured.
    scratch_bytes: (algorithms, batch_size + 1), likewise.
    free: numbers of the algorithms without setup time and prepared bytes, which cost only the time of steps.
    """

    names: tuple[str, ...]
    setup_ps: FloatArray
    prepared_bytes: IntArray
    step_ps: FloatArray
    scratch_bytes: IntArray
    free: frozenset[int]

    def setup_of(self, algorithms: Collection[int]) -> float:
        """Return the sum of these algorithms' setup times in picoseconds."""
        return float(self.setup_ps[sorted(algorithms)].sum())

    def prepared_of(self, algorithms: Collection[int]) -> int:
        """Return the sum of these algorithms' prepared bytes, the memory for data that micro-batches share."""
        return int(self.prepared_bytes[sorted(algorithms)].sum())

    def configuration(self, parts: Sequence[tuple[int, int]]) -> Configuration:
        """Return the configuration of these pairs (algorithm number, micro-batch size), with its time and workspace.

        The micro-batches are put in running order.
        """
        ordered = sorted(parts, key=lambda part: (part[0], -part[1]))
        algorithms, sizes = np.array(ordered).T
        time_ps = self.setup_of({*algorithms.tolist()}) + self.step_ps[algorithms, sizes].sum()
        workspace = self.prepared_of({*algorithms.tolist()}) + self.scratch_bytes[algorithms, sizes].max()
        micro_configs = tuple(MicroConfig(self.names[algorithm], size) for algorithm, size in ordered)
        return Configuration(micro_configs, float(time_ps) / PICOSECONDS, int(workspace))


def pool(measurements: Sequence[Measurement], batch_size: int) -> CostArrays:
    """Merge the measurements of one problem into one ``CostArrays``, for micro-batches up to ``batch_size``.

    The setup time of an algorithm is the median of its measurements, its prepared bytes are their maximum. An algorithm
    that was measured more than once at the same micro-batch size gets the median of the times and the maximum of the
    scratch bytes. Larger micro-batches are left out.

    Raises ``InvalidInputError`` unless ``batch_size`` is a whole number of at least 1, and if a measurement is negative
    or not finite.
    """
    batch_size = whole(batch_size, "batch_size", 1)
    for measurement in measurements:
        subject = f"measurement of {measurement.micro_config.algorithm} {measurement.micro_config.micro_batch_size}"
        for name in ("setup_s", "step_s", "prepared_bytes", "scratch_bytes"):
            value = getattr(measurement, name)
            if not 0 <= value * PICOSECONDS < math.inf:
                raise InvalidInputError(
                    f"{subject}: {name} is {value}; it must be finite and at least 0; measure it again"
                )
    by_algorithm = grouped((measurement.micro_config.algorithm, measurement) for measurement in measurements)
    by_micro_config = grouped((measurement.micro_config, measurement) for measurement in measurements)
    names = tuple(sorted(by_algorithm))
    step_ps = np.full((len(names), batch_size + 1), np.inf)
    scratch_bytes = np.zeros(step_ps.shape, dtype=np.int64)
    for micro_config, rows in by_micro_config.items():
        if micro_config.micro_batch_size <= batch_size:
            place = names.index(micro_config.algorithm), micro_config.micro_batch_size
            step_ps[place] = _picoseconds([row.step_s for row in rows])
            scratch_bytes[place] = max(row.scratch_bytes for row in rows)
    setup_ps = np.array([_picoseconds([row.setup_s for row in by_algorithm[name]]) for name in names])
    prepared = np.array([max(row.prepared_bytes for row in by_algorithm[name]) for name in names], dtype=np.int64)
    free = frozenset(np.flatnonzero((setup_ps == 0) & (prepared == 0)).tolist())
    return CostArrays(names, setup_ps, prepared, step_ps, scratch_bytes, free)


def _picoseconds(times_s: Sequence[float]) -> float:
    return float(np.rint(median(times_s) * PICOSECONDS))


# The sweep

AlgorithmSet = frozenset[int]  # Numbers of algorithms; the free ones belong to every set and are not listed.


class Rows(NamedTuple):
    """A table of configurations. In each row, a set of algorithms covers ``n`` samples in this time and workspace."""

    set_number: IntArray
    n: IntArray
    time_ps: FloatArray
    workspace_bytes: IntArray

    def take(self, rows: IntArray) -> Rows:
        return Rows(self.set_number[rows], self.n[rows], self.time_ps[rows], self.workspace_bytes[rows])


def _sweep(costs: CostArrays, sets: Sequence[AlgorithmSet]) -> Rows:
    """Return the candidates for the desirable sets (Pareto fronts) of every n, as configurations of ``sets``.

    The candidates include all desirable configurations. The sweep leaves out configurations dominated, at the same
    scratch, by one of the ``sets`` of at most one algorithm (*singles*) that takes less time with no more prepared
    bytes, or the same time with fewer.
    """
    setup_ps = np.array([costs.setup_of(s) for s in sets])
    prepared_bytes = np.array([costs.prepared_of(s) for s in sets], dtype=np.int64)
    table = np.full((len(sets), costs.step_ps.shape[1]), np.inf)  # T[set, n] in picoseconds
    table[:, 0] = 0
    sets_with = [
        np.array([i for i, s in enumerate(sets) if a in s or a in costs.free], dtype=np.int64)
        for a in range(len(costs.names))
    ]
    singles = sorted((i for i, s in enumerate(sets) if len(s) <= 1), key=lambda i: int(prepared_bytes[i]))
    rank = {single: i for i, single in enumerate(singles)}
    least_ps = np.full((len(singles) + 1, table.shape[1]), np.inf)  # [i]: of the i least prepared
    preparing_less = np.searchsorted(prepared_bytes[singles], prepared_bytes, side="left")
    preparing_no_more = np.searchsorted(prepared_bytes[singles], prepared_bytes, side="right")

    nothing = np.empty(0, dtype=np.int64)
    candidates = [Rows(nothing, nothing, np.empty(0), nothing)]
    algorithms, sizes = np.nonzero(np.isfinite(costs.step_ps))
    order = np.lexsort((algorithms, -sizes, costs.scratch_bytes[algorithms, sizes]))  # least scratch, then largest size
    for algorithm, size in zip(algorithms[order].tolist(), sizes[order].tolist(), strict=True):
        step_ps = float(costs.step_ps[algorithm, size])
        changed = sets_with[algorithm]
        changed = changed[table[changed, size] > step_ps]
        if not changed.size:
            continue
        steps_ps = table[changed]
        before = steps_ps[:, size:].copy()
        # Allow one more step, then two more, four more, ..., which covers any number of steps.
        added, added_ps = size, step_ps
        while added < steps_ps.shape[1]:
            np.minimum(steps_ps[:, added:], steps_ps[:, :-added] + added_ps, out=steps_ps[:, added:])
            added, added_ps = 2 * added, 2 * added_ps
        table[changed] = steps_ps
        after = steps_ps[:, size:]
        time_ps = after + setup_ps[changed, None]
        for number, row in zip(changed.tolist(), time_ps, strict=True):
            if number in rank:
                least = least_ps[rank[number] + 1 :, size:]
                np.minimum(least, row, out=least)
        # Times are whole numbers. A tie with equal prepared bytes is kept, because it may need fewer micro-batches.
        bounds = np.minimum(least_ps[preparing_less[changed], size:], least_ps[preparing_no_more[changed], size:] + 1)
        rows, columns = np.nonzero((after < before) & (time_ps < bounds))
        workspace_bytes = prepared_bytes[changed] + costs.scratch_bytes[algorithm, size]
        candidates.append(Rows(changed[rows], columns + size, time_ps[rows, columns], workspace_bytes[rows]))
    return Rows(*(np.concatenate(column) for column in zip(*candidates, strict=True)))


# Desirable sets

Part = tuple[int, int]  # algorithm number, micro-batch size


def fastest_micro_batches(costs: CostArrays, n: int, algorithms: Collection[int], scratch_bytes: int) -> list[Part]:
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
    table = np.full(n + 1, np.inf)  # the least cost of covering i samples
    table[0] = 0
    ends = np.searchsorted(sizes, np.arange(n + 1), side="right").tolist()
    for i in range(1, n + 1):
        if ends[i]:
            table[i] = (table[i - sizes[: ends[i]]] + costs_of_sizes[: ends[i]]).min()
    parts = []
    while n > 0:
        reach = sizes <= n
        tied = sizes[reach][table[n - sizes[reach]] + costs_of_sizes[reach] == table[n]]
        algorithm, negative_size = min((int(least_at[size]), -int(size)) for size in tied)
        parts.append((allowed[algorithm], -negative_size))
        n += negative_size
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class DesirableSets:
    """The desirable set (Pareto front of time and workspace) of every batch size from 1 to ``batch_size``.

    Configurations are built on demand. Every method raises ``InvalidInputError`` if its ``n`` is not in 1..batch_size.
    """

    batch_size: int
    _costs: CostArrays
    _sets: tuple[AlgorithmSet, ...]
    _front: Rows  # Sorted by n, then workspace; a point has several rows if sets tie.

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
        return fastest_micro_batches(self._costs, n, algorithms | self._costs.free, scratch_bytes)


def desirable_sets(measurements: Sequence[Measurement], batch_size: int) -> DesirableSets:
    """Find the exact desirable sets of the batch sizes 1..batch_size from the measurements of one problem.

    Raises ``InvalidInputError`` if ``batch_size`` is below 1 or a measurement is negative or not finite.
    """
    costs = pool(measurements, batch_size)
    paid = sorted(frozenset(range(len(costs.names))) - costs.free)
    sets = [frozenset(members) for size in range(3) for members in combinations(paid, size)]
    candidates = _sweep(costs, sets)
    larger = _larger_sets(sets, candidates)
    if larger:
        sets = [*sets, *larger]
        candidates = _sweep(costs, sets)
    return DesirableSets(batch_size, costs, tuple(sets), _pareto(candidates))


def _larger_sets(sets: Sequence[AlgorithmSet], candidates: Rows) -> list[AlgorithmSet]:
    """Return the sets of three or more algorithms in which the sweep found every pair useful; no others can matter.

    If the sweep finds nothing for a pair, another set covers the same samples with no more scratch in less time, or in
    the same time with fewer prepared bytes. That set can replace the pair in any larger configuration, which is
    therefore not in the desirable set.
    """
    pairs = {sets[i] for i in np.unique(candidates.set_number) if len(sets[i]) == 2}
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


def _pareto(candidates: Rows) -> Rows:
    """Keep the Pareto front of each n.

    A configuration is kept if it is faster than all with less workspace, and no slower than any with the same
    workspace.
    """
    candidates = candidates.take(np.lexsort((candidates.time_ps, candidates.workspace_bytes, candidates.n)))
    times, rank = np.unique(candidates.time_ps, return_inverse=True)
    # The key decreases from one n to the next, so that one running minimum serves all.
    key = rank - candidates.n * (times.size + 1)
    new_point = (np.diff(candidates.n, prepend=-1) != 0) | (np.diff(candidates.workspace_bytes, prepend=-1) != 0)
    least = key[new_point]
    least_before = np.minimum.accumulate(np.concatenate([[1], least[:-1]]))
    point = np.cumsum(new_point) - 1
    return candidates.take(np.flatnonzero((key == least[point]) & (least < least_before)[point]))
