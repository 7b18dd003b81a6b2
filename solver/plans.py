"""The plans of a graph: how it is cut into segments, and each of these into bands.

    memory = max over segments of (whole results alive + bands of the results inside + kept rows + scratch - overlaps)
    time   = sum over segments, bands and operators of (seconds per call + rows * seconds per row)

``plans`` finds the exact Pareto front of both over all cuts, numbers of bands and ways to treat halos, by dynamic
programming over the order of the operators. Depth-first execution of layers is due to Alwani et al., *Fused-layer CNN
accelerators* (2016), and within a bound on memory to Lin et al., *MCUNetV2* (2021), section 3.

Results that are written over tensors whose rows are read for the last time.

Where both are in memory they overlap, as far apart as no band needs what it or an earlier one overwrote: the diagonal
memory optimisation of Blacker, Bridges and Hadfield (*Diagonal Memory Optimisation for Machine Learning on
Micro-controllers*, 2020), for bands instead of whole operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mucudnn.solver.bands import Cut, Graph, Indices, Operator, Ranges, Segment

# Results written over others


@dataclass(frozen=True, slots=True)
class Overlap:
    """The result of operator ``written`` may overlap that of ``read``, which its segment reads for the last time.

    distance_bytes: by which the latter starts at least behind the former. saved_bytes: what both need less together.
    """

    read: int
    written: int
    distance_bytes: int
    saved_bytes: int


class Overlaps:
    """The results that a segment before ``stop`` may write over earlier ones, while operators are added from the last.

    first: of each earlier result that is not needed later, the byte of a sample at which band k and later ones begin to
    read. end: of results that are whole, the bytes of a sample that are written after band k.
    """

    def __init__(self, graph: Graph, stop: int, cut: Cut) -> None:
        self.graph, self.stop, self.cut = graph, stop, cut
        self.first: dict[int, Indices] = {}
        self.end: dict[int, Indices] = {}
        self.known: dict[tuple[int, int], Overlap] = {}

    def add(self, index: int, ranges: Ranges) -> list[Overlap]:
        """Add an operator, and return the overlaps of the segment that starts with it, no result in two of them."""
        if self.cut.bands == 1 and self.cut.samples >= self.graph.samples:
            return []  # all is read while all is written
        operator, changed = self.graph.operators[index], set[int]()
        self.first.pop(index, None)
        if self.graph.is_whole(index, self.stop) and operator.row_bytes and operator.whole_bytes:
            self.end[index] = ranges.high * operator.row_bytes
            changed.update(self.first)
        for source, first in self._first_reads(operator, ranges):
            self.first[source] = np.minimum(self.first.get(source, first), first)
            changed.add(source)
        for read in changed:
            self.known |= {(read, written): self._overlap(read, written) for written in self.end}
        found, taken = list[Overlap](), set[int]()
        for one in sorted(self.known.values(), key=lambda one: -one.saved_bytes):
            if one.read in self.first and one.saved_bytes > 0 and not taken & {one.read, one.written}:
                found.append(one)
                taken |= {one.read, one.written}
        return found

    def _first_reads(self, operator: Operator, ranges: Ranges) -> Iterator[tuple[int, Indices]]:
        """Yield what an operator reads and no operator after the segment, with the values for ``first``."""
        reads = [*((source, None) for source in operator.whole), *((one.source, one.first) for one in operator.reaches)]
        for source, first in reads:
            if source in self.graph.may_be_overwritten and self.graph.last_use[source] < self.stop:
                if first is None or self.cut.bands == 1:
                    yield source, np.zeros(self.cut.bands, np.int64)
                else:
                    first = np.minimum.accumulate(first.take(ranges.new[::-1], mode="clip"))[::-1]
                    yield source, first * self.graph.operators[source].row_bytes

    def _overlap(self, read: int, written: int) -> Overlap:
        samples, at_once = self.graph.samples, self.cut.samples
        sizes = [self.graph.operators[index].whole_bytes for index in (read, written)]
        of_sample = [size // samples for size in sizes]
        before_last = (samples - 1) // at_once * at_once  # samples
        distance = int((self.end[written] - self.first[read]).max()) + (at_once - 1) * of_sample[1]
        distance += max(before_last * (of_sample[1] - of_sample[0]), 0)
        return Overlap(read, written, distance, min(sizes[0], sizes[1] - distance))


_T = TypeVar("_T")

# Costs of segments


def cuts(graph: Graph, stop: int) -> Iterator[Cut]:
    """Yield the ways to cut segments that end before operator ``stop``: samples halved, then rows of one sample."""
    samples, bands, rows = graph.samples, 1, graph.operators[stop - 1].rows
    yield Cut(samples, 1)
    while samples > 1 and rows:
        samples = -(-samples // 2)
        yield Cut(samples, 1)
    while bands < rows:
        bands = min(2 * bands, rows)
        yield Cut(1, bands)
        yield Cut(1, bands, keeps=False)


@dataclass(slots=True)
class _Extent:
    """The size of an operator's part in a segment, whatever its variant.

    calls, rows: of all bands and samples. largest: rows of its largest band. end: the last operator in the segment that
    reads its result. overlapping_bytes: of the segment that starts with it.
    """

    index: int
    calls: int
    rows: int
    largest: int
    band_bytes: int
    lasting_bytes: int
    end: int
    overlapping_bytes: int


def _extent(graph: Graph, index: int, stop: int, cut: Cut, ranges: Ranges, overlapping_bytes: int) -> _Extent:
    row_bytes, computed = cut.samples * graph.operators[index].row_bytes, ranges.computed
    calls = -(-graph.samples // cut.samples) * int(np.count_nonzero(computed))
    rows, largest = graph.samples * int(computed.sum()), int(computed.max()) * cut.samples
    end = max((reader for reader, _ in graph.readers[index] if reader < stop), default=index)
    if graph.is_whole(index, stop):
        whole_bytes = graph.operators[index].whole_bytes
        return _Extent(index, calls, rows, largest, 0, whole_bytes, end, overlapping_bytes)
    kept = ranges.kept * row_bytes if cut.keeps and cut.bands > 1 else 0
    return _Extent(index, calls, rows, largest, ranges.held * row_bytes, kept, end, overlapping_bytes)


def segment_costs(graph: Graph, stop: int, cut: Cut) -> Iterator[tuple[int, Cut, int, float]]:
    """Yield start, cut, bytes and seconds of the segments that end before ``stop``, cut in this way, of each variant.

    The bytes are without whole results from before the segment.
    """
    last = graph.operators[stop - 1]
    if last.is_barrier:
        yield stop - 1, cut, last.whole_bytes + last.costs[0].scratch_bytes, last.costs[0].call_s
        return
    overlaps, extents = Overlaps(graph, stop, cut), []
    for index, ranges in graph.ranges(graph.starts(stop)[-1], stop, cut):
        saved_bytes = sum(one.saved_bytes for one in overlaps.add(index, ranges))
        extents.append(_extent(graph, index, stop, cut, ranges, saved_bytes))
    for variant in range(graph.variants):
        yield from _variant_costs(graph, stop, replace(cut, variant=variant), extents)


def _variant_costs(
    graph: Graph, stop: int, cut: Cut, extents: Sequence[_Extent]
) -> Iterator[tuple[int, Cut, int, float]]:
    alive, time_s, lasting_bytes = np.zeros(stop, np.int64), 0.0, 0  # alive: bands, and scratch of the operator
    for one in extents:
        costs = graph.operators[one.index].costs_of(cut)
        time_s += costs.setup_s + costs.call_s * one.calls + costs.row_s * one.rows
        lasting_bytes += costs.prepared_bytes + one.lasting_bytes
        alive[one.index : one.end + 1] += one.band_bytes
        alive[one.index] += costs.scratch_bytes + costs.scratch_row_bytes * one.largest
        yield one.index, cut, lasting_bytes + int(alive[one.index :].max()) - one.overlapping_bytes, time_s


# Plans


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to run a graph: segments in order, with the predicted memory and time."""

    memory_bytes: int
    time_s: float
    segments: tuple[Segment, ...]


@dataclass(slots=True)
class _Front:
    """The Pareto front of the operators before some index: bytes and seconds of each point.

    before: of each point, the number of the point at the start of its last segment.
    """

    memory: NDArray[np.int64]
    time_s: NDArray[np.float64]
    before: NDArray[np.int64]
    last: list[Segment]


def plans(graph: Graph) -> tuple[Plan, ...]:
    """Return the Pareto front of all plans, from the least memory to the least time."""
    nothing = np.zeros(1, np.int64)
    fronts = [_Front(nothing, nothing.astype(np.float64), nothing, [])]
    for of_stop in _segments(graph):
        options: dict[int, list[tuple[int, float, Segment]]] = {}
        for memory, time_s, segment in of_stop:
            options.setdefault(segment.start, []).append((memory, time_s, segment))
        found = [
            (segment, np.maximum(fronts[start].memory, memory), fronts[start].time_s + time_s)
            for start, of_start in options.items()
            for memory, time_s, segment in undominated(of_start)
        ]
        fronts.append(_merged(found))
    return tuple(_plan(fronts, number) for number in range(len(fronts[-1].last)))


def plan_within(graph: Graph, budget_bytes: int) -> tuple[Plan, tuple[int, ...]]:
    """Return the fastest plan within a budget, and the bytes that are in use while each of its segments runs.

    If no plan is within the budget, it is one whose segments exceed it by the fewest bytes in total.
    """
    best: list[tuple[int, float, int, Segment | None]] = [(0, 0.0, 0, None)]  # excess, seconds, bytes, last segment
    for of_stop in _segments(graph):
        points = (
            (best[one.start][0] + max(memory - budget_bytes, 0), best[one.start][1] + time_s, memory, one)
            for memory, time_s, one in of_stop
        )
        best.append(min(points, key=lambda point: point[:3]))
    found = []
    _, time_s, memory, segment = best[-1]
    while segment is not None:
        found.append((memory, segment))
        _, _, memory, segment = best[segment.start]
    needed, segments = zip(*reversed(found), strict=True) if found else ((0,), ())
    return Plan(max(needed), time_s, segments), needed


def _segments(graph: Graph) -> Iterator[Iterator[tuple[int, float, Segment]]]:
    """Yield for each number of operators the segments that end there, with all bytes in use and the seconds."""
    live = _live_before(graph)

    def ending(stop: int) -> Iterator[tuple[int, float, Segment]]:
        for cut in cuts(graph, stop):
            for start, of_variant, needed, time_s in segment_costs(graph, stop, cut):
                yield live[start] + needed, time_s, Segment(start, stop, of_variant)

    return map(ending, range(1, len(graph) + 1))


def _merged(found: Sequence[tuple[Segment, NDArray[np.int64], NDArray[np.float64]]]) -> _Front:
    """Return the front of all points: of those that end with a segment, the bytes and the seconds."""
    memory, time_s = (np.concatenate([one[i] for one in found]) for i in (1, 2))
    sizes = [len(one[1]) for one in found]
    segment = np.repeat(np.arange(len(found)), sizes)
    before = np.concatenate([np.arange(size) for size in sizes])
    order = np.lexsort((time_s, memory))
    fastest = np.minimum.accumulate(time_s[order])
    kept = order[np.concatenate(([True], fastest[1:] < fastest[:-1]))]
    return _Front(memory[kept], time_s[kept], before[kept], [found[number][0] for number in segment[kept]])


def _live_before(graph: Graph) -> list[int]:
    """Return, for each start of a segment, the bytes of earlier whole results that are needed from there on."""
    live = [0] * (len(graph) + 1)
    for index, operator in enumerate(graph.operators):
        for start in range(index + 1, min(graph.last_use[index], len(graph)) + 1):
            live[start] += operator.whole_bytes
    return live


def undominated(points: Iterable[tuple[int, float, _T]]) -> list[tuple[int, float, _T]]:
    """Return the points (bytes, seconds, anything) that no other beats in both numbers, from the least bytes on."""
    kept: list[tuple[int, float, _T]] = []
    for point in sorted(points, key=lambda one: one[:2]):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _plan(fronts: Sequence[_Front], number: int) -> Plan:
    front, segments = fronts[-1], []
    memory_bytes, time_s = int(front.memory[number]), float(front.time_s[number])
    while front.last:
        segments.append(front.last[number])
        number, front = int(front.before[number]), fronts[front.last[number].start]
    return Plan(memory_bytes, time_s, tuple(reversed(segments)))
