"""The plans of a graph: how it is cut into segments, and each of these into bands.

    memory = max over segments of (whole results alive + bands of the results inside + kept rows + scratch - overlaps)
    time   = sum over segments, bands and operators of (seconds per call + rows * seconds per row)

``plans`` finds the exact Pareto front of both over all cuts, numbers of bands and ways to treat halos, by dynamic
programming over the order of the operators. Depth-first execution of layers is due to Alwani et al., *Fused-layer CNN
accelerators* (2016), and within a bound on memory to Lin et al., *MCUNetV2* (2021), section 3.

Results are written over tensors whose rows are read for the last time. Where both are in memory they overlap, as far
apart as no band needs what it or an earlier one overwrote: the diagonal memory optimisation of Blacker, Bridges and
Hadfield (*Diagonal Memory Optimisation for Machine Learning on Micro-controllers*, 2020), for bands instead of whole
operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np

from mucudnn.core.values import grouped
from mucudnn.solver.bands import Cut, Graph, Indices, Ranges, Segment, Vertex

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
    read. last_reader: of these, the last operator that reads. written: results that are whole, of ``sizes`` bytes;
    ends: of each, the bytes of a sample that are written after band k. saving: what overlaps would save, by what is
    read: minus the bytes, what is read and written, and the distance.
    """

    def __init__(self, graph: Graph, stop: int, cut: Cut) -> None:
        self.graph, self.stop, self.cut = graph, stop, cut
        self.first: dict[int, Indices] = {}
        self.last_reader: dict[int, int] = {}
        self.written, self.sizes = np.zeros((2, 0), np.int64)
        self.ends: Indices = np.zeros((0, cut.bands), np.int64)
        self.saving: dict[int, list[tuple[int, int, int, int]]] = {}

    def add(self, index: int, ranges: Ranges) -> list[Overlap]:
        """Add an operator, and return the overlaps of the segment that starts with it, no result in two of them."""
        if self.cut.bands == 1 and self.cut.samples >= self.graph.samples:
            return []  # all is read while all is written
        operator, changed = self.graph.operators[index], set[int]()
        self.first.pop(index, None)
        self.saving.pop(index, None)
        if self.graph.is_whole(index, self.stop) and operator.row_bytes and operator.whole_bytes:
            self.written, self.sizes = np.append(self.written, index), np.append(self.sizes, operator.whole_bytes)
            self.ends = np.concatenate((self.ends, [ranges.high * operator.row_bytes]))
            changed.update(self.first)
        for source, first in self._first_reads(operator, ranges):
            self.first[source] = np.minimum(self.first.get(source, first), first)
            self.last_reader.setdefault(source, index)
            changed.add(source)
        if len(self.written):
            self.saving |= {read: self._savings(read) for read in changed}
        found, taken = list[Overlap](), set[int]()
        for less_bytes, read, written, distance in sorted(chain.from_iterable(self.saving.values())):
            if read not in taken and written not in taken:
                found.append(Overlap(read, written, distance, -less_bytes))
                taken |= {read, written}
        return found

    def _first_reads(self, operator: Vertex, ranges: Ranges) -> Iterator[tuple[int, Indices]]:
        """Yield what an operator reads and no operator after the segment, with the values for ``first``."""
        reads = [*((source, None) for source in operator.whole), *((one.source, one.first) for one in operator.reaches)]
        for source, first in reads:
            if source in self.graph.may_be_overwritten and self.graph.last_use[source] < self.stop:
                if first is None or self.cut.bands == 1:
                    yield source, np.zeros(self.cut.bands, np.int64)
                else:
                    first = np.minimum.accumulate(first.take(ranges.new[::-1], mode="clip"))[::-1]
                    yield source, first * self.graph.operators[source].row_bytes

    def _savings(self, read: int) -> list[tuple[int, int, int, int]]:
        """Return what the overlaps of a result that is read with those that are written would save, where they do."""
        samples, at_once = self.graph.samples, self.cut.samples
        read_bytes = self.graph.operators[read].whole_bytes
        of_read, of_written = read_bytes // samples, self.sizes // samples
        before_last = (samples - 1) // at_once * at_once  # samples
        first = self.first[read]
        later = np.append(first[1:], first[0] + at_once * of_read)
        has_read = self.last_reader[read] < self.written  # a band has read what it needs before it writes
        distances = (self.ends - np.where(has_read[:, None], later, first)).max(1)
        distances += (at_once - 1) * of_written
        distances = np.maximum(distances + np.maximum(before_last * (of_written - of_read), 0), 0)
        saved = np.minimum(read_bytes, self.sizes - distances)
        every = zip(saved.tolist(), self.written.tolist(), distances.tolist(), strict=True)
        return [(-size, read, written, distance) for size, written, distance in every if size > 0]


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


def segment_costs(graph: Graph, stop: int, cut: Cut) -> Iterator[tuple[int, Cut, int, float]]:
    """Yield start, cut, bytes and seconds of the segments that end before ``stop``, cut in this way, of each variant.

    The bytes are without whole results from before the segment.
    """
    last = graph.operators[stop - 1]
    if last.is_barrier:
        yield stop - 1, cut, last.whole_bytes + last.costs[0].scratch_bytes, last.costs[0].call_s
        return
    overlaps, batches = Overlaps(graph, stop, cut), -(-graph.samples // cut.samples)
    variants = [replace(cut, variant=variant) for variant in range(graph.variants)]
    # Of each variant: seconds, lasting bytes, and bytes of bands and scratch alive with each operator.
    time_s, lasting_bytes = [0.0] * len(variants), [0] * len(variants)
    alive = np.zeros((len(variants), stop), np.int64)
    found: list[list[tuple[int, Cut, int, float]]] = [[] for _ in variants]
    for index, ranges in graph.ranges(graph.starts(stop)[-1], stop, cut):
        overlapping_bytes = sum(one.saved_bytes for one in overlaps.add(index, ranges))
        operator, computed = graph.operators[index], ranges.computed
        calls, rows = batches * int(np.count_nonzero(computed)), graph.samples * int(computed.sum())
        largest = int(computed.max()) * cut.samples
        end = max((reader for reader, _ in graph.readers[index] if reader < stop), default=index)
        band_bytes, kept_bytes = ranges.held * cut.samples * operator.row_bytes, 0
        if graph.is_whole(index, stop):
            band_bytes, kept_bytes = 0, operator.whole_bytes
        elif cut.keeps and cut.bands > 1:
            kept_bytes = ranges.kept * cut.samples * operator.row_bytes
        for number, of_variant in enumerate(variants):
            costs = operator.costs_of(of_variant)
            time_s[number] += costs.setup_s + costs.call_s * calls + costs.row_s * rows
            lasting_bytes[number] += costs.prepared_bytes + kept_bytes
            alive[number, index : end + 1] += band_bytes
            alive[number, index] += costs.scratch_bytes + costs.scratch_row_bytes * largest
            needed = lasting_bytes[number] + int(alive[number, index:].max()) - overlapping_bytes
            found[number].append((index, of_variant, needed, time_s[number]))
    for segments in found:
        yield from segments


# Plans


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to run a graph: segments in order, with the predicted memory and time."""

    memory_bytes: int
    time_s: float
    segments: tuple[Segment, ...]


def plans(graph: Graph) -> tuple[Plan, ...]:
    """Return the Pareto front of all plans, from the least memory to the least time."""
    nothing = np.zeros(1, np.int64)
    # Of the operators before each index, the points of the Pareto front: bytes, seconds, the number of the point at the
    # start of its last segment, and that segment.
    fronts = [(nothing, nothing.astype(np.float64), nothing, list[Segment]())]
    for of_stop in _segments(graph):
        options = grouped((segment.start, (nbytes, seconds, segment)) for nbytes, seconds, segment in of_stop)
        found = [
            (segment, np.maximum(fronts[start][0], memory_bytes), fronts[start][1] + seconds)
            for start, of_start in options.items()
            for memory_bytes, seconds, segment in undominated(of_start)
        ]
        memory, time_s = (np.concatenate([one[i] for one in found]) for i in (1, 2))
        sizes = [len(one[1]) for one in found]
        last = np.repeat(np.arange(len(found)), sizes)
        before = np.concatenate([np.arange(size) for size in sizes])
        order = np.lexsort((time_s, memory))
        fastest = np.minimum.accumulate(time_s[order])
        kept = order[np.concatenate(([True], fastest[1:] < fastest[:-1]))]
        fronts.append((memory[kept], time_s[kept], before[kept], [found[number][0] for number in last[kept]]))
    made = []
    for point in range(len(fronts[-1][3])):
        number, (memory, time_s, before, ending), segments = point, fronts[-1], list[Segment]()
        plan_bytes, plan_s = int(memory[number]), float(time_s[number])
        while ending:
            segments.append(ending[number])
            number, (_, _, before, ending) = int(before[number]), fronts[segments[-1].start]
        made.append(Plan(plan_bytes, plan_s, tuple(reversed(segments))))
    return tuple(made)


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


def _live_bytes(graph: Graph) -> list[int]:
    """Return for each start of a segment the bytes of earlier whole results that are needed from there on."""
    live = [0] * (len(graph) + 1)
    for index, operator in enumerate(graph.operators):
        for start in range(index + 1, min(graph.last_use[index], len(graph)) + 1):
            live[start] += operator.whole_bytes
    return live


def _segments(graph: Graph) -> Iterator[Iterator[tuple[int, float, Segment]]]:
    """Yield for each number of operators the segments that end there, with all bytes in use and the seconds."""
    live = _live_bytes(graph)

    def ending(stop: int) -> Iterator[tuple[int, float, Segment]]:
        for cut in cuts(graph, stop):
            for start, of_variant, needed, time_s in segment_costs(graph, stop, cut):
                yield live[start] + needed, time_s, Segment(start, stop, of_variant)

    return map(ending, range(1, len(graph) + 1))


def closer(graph: Graph, plan: Plan) -> Plan:
    """Return a plan that needs no more memory, whose segments write results as close over earlier ones as they can.

    Each result that is written over another begins some rows before it. After many of these, the arena is larger than
    the most bytes in use at a time. The first variant runs where there is memory for it: the scratch of a later one,
    which may be torch's, is not part of the arena.
    """

    def saved_bytes(one: Segment) -> int:
        overlaps, found = Overlaps(graph, one.stop, one.cut), list[Overlap]()
        for index, ranges in graph.ranges(one.start, one.stop, one.cut):
            found = overlaps.add(index, ranges)
        return sum(overlap.saved_bytes for overlap in found)

    live, time_s, segments = _live_bytes(graph), plan.time_s, list[Segment]()
    for one in plan.segments:
        segments.append(one)
        if graph.operators[one.start].is_barrier:
            continue
        tried = cuts(graph, one.stop) if saved_bytes(one) else [one.cut]
        costs = (found for cut in tried for found in segment_costs(graph, one.stop, cut))
        alike = [(replace(one, cut=cut), size, seconds) for start, cut, size, seconds in costs if start == one.start]
        ordered = (
            (-saved_bytes(other), other.cut.variant, size, seconds, other)
            for other, size, seconds in alike
            if live[one.start] + size <= plan.memory_bytes
        )
        *_, seconds, segments[-1] = min(ordered, key=lambda found: found[:4])
        time_s += seconds - next(of for other, _, of in alike if other == one)
    return replace(plan, time_s=time_s, segments=tuple(segments))


def undominated(points: Iterable[tuple[int, float, _T]]) -> list[tuple[int, float, _T]]:
    """Return the points (bytes, seconds, anything) that no other beats in both numbers, from the least bytes on."""
    kept: list[tuple[int, float, _T]] = []
    for point in sorted(points, key=lambda one: one[:2]):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
