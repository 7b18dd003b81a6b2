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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mucudnn.core.values import grouped
from mucudnn.solver.bands import Cut, Graph, Indices, Ranges, Segment

# Results written over others


@dataclass(frozen=True, slots=True)
class Overlap:
    """The result of operator ``written`` may overlap that of ``read``, which its segment reads for the last time.

    distance_bytes: by which the latter starts at least behind the former.
    saved_bytes: what both need less together.
    """

    read: int
    written: int
    distance_bytes: int
    saved_bytes: int


class Overlaps:
    """The results that a segment before ``stop`` may write over earlier ones, while operators are added from the last.

    first: of each earlier result that is not needed later, the byte of a sample at which band k and later ones begin to
    read.
    last_reader: of these, the last operator that reads.
    written: results that are whole.
    sizes: their bytes.
    ends: of each, the bytes of a sample that are written after band k.
    saving: what overlaps would save, by what is read: minus the bytes, what is read and written, and the distance.
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
        # Where bands begin to read earlier results that nothing after the segment reads.
        in_rows = ((reach.source, reach.first) for reach in operator.reaches)
        for source, rows in (*((source, None) for source in operator.whole), *in_rows):
            if source not in self.graph.may_be_overwritten or self.graph.last_use[source] >= self.stop:
                continue
            first = np.zeros(self.cut.bands, np.int64)
            if rows is not None and self.cut.bands > 1:
                earliest = np.minimum.accumulate(rows.take(ranges.new[::-1], mode="clip"))[::-1]
                first = earliest * self.graph.operators[source].row_bytes
            self.first[source] = np.minimum(self.first.get(source, first), first)
            self.last_reader.setdefault(source, index)
            changed.add(source)
        if len(self.written):
            self.saving |= {read: self._savings(read) for read in changed}
        # Take the overlaps that save most, no result twice.
        overlaps, taken = list[Overlap](), set[int]()
        for less_bytes, read, written, distance in sorted(chain.from_iterable(self.saving.values())):
            if read not in taken and written not in taken:
                overlaps.append(Overlap(read, written, distance, -less_bytes))
                taken |= {read, written}
        return overlaps

    def _savings(self, read: int) -> list[tuple[int, int, int, int]]:
        """Return what the overlaps of a result that is read with those that are written would save, where they do."""
        samples, at_once = self.graph.samples, self.cut.samples
        read_bytes = self.graph.operators[read].whole_bytes
        sample_bytes, written_sample_bytes = read_bytes // samples, self.sizes // samples
        before_last = (samples - 1) // at_once * at_once  # samples
        first = self.first[read]
        later = np.append(first[1:], first[0] + at_once * sample_bytes)
        has_read = self.last_reader[read] < self.written  # a band has read what it needs before it writes
        distances = (self.ends - np.where(has_read[:, None], later, first)).max(1)
        distances += (at_once - 1) * written_sample_bytes
        distances = np.maximum(distances + np.maximum(before_last * (written_sample_bytes - sample_bytes), 0), 0)
        saved = np.minimum(read_bytes, self.sizes - distances)
        pairs = zip(saved.tolist(), self.written.tolist(), distances.tolist(), strict=True)
        return [(-size, read, written, distance) for size, written, distance in pairs if size > 0]


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
    segments: list[list[tuple[int, Cut, int, float]]] = [[] for _ in variants]
    for index, ranges in graph.ranges(graph.starts(stop)[-1], stop, cut):
        # What the operator adds to all variants alike.
        overlapping_bytes = sum(overlap.saved_bytes for overlap in overlaps.add(index, ranges))
        operator, computed = graph.operators[index], ranges.computed
        calls, rows = batches * int(np.count_nonzero(computed)), graph.samples * int(computed.sum())
        largest = int(computed.max()) * cut.samples
        end = max((reader for reader, _ in graph.readers[index] if reader < stop), default=index)
        band_bytes, kept_bytes = ranges.held * cut.samples * operator.row_bytes, 0
        if graph.is_whole(index, stop):
            band_bytes, kept_bytes = 0, operator.whole_bytes
        elif cut.keeps and cut.bands > 1:
            kept_bytes = ranges.kept * cut.samples * operator.row_bytes
        for number, variant in enumerate(variants):
            costs = operator.costs_of(variant)
            time_s[number] += costs.setup_s + costs.call_s * calls + costs.row_s * rows
            lasting_bytes[number] += costs.prepared_bytes + kept_bytes
            alive[number, index : end + 1] += band_bytes
            alive[number, index] += costs.scratch_bytes + costs.scratch_row_bytes * largest
            needed = lasting_bytes[number] + int(alive[number, index:].max()) - overlapping_bytes
            segments[number].append((index, variant, needed, time_s[number]))
    yield from chain.from_iterable(segments)


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
    for segments in _segments(graph):
        # Extend the points at the start of each segment by it.
        by_start = grouped((segment.start, (size_bytes, seconds, segment)) for size_bytes, seconds, segment in segments)
        useful = [option for options in by_start.values() for option in undominated(options)]
        starts = [fronts[segment.start] for _, _, segment in useful]
        memory = np.concatenate([np.maximum(front[0], option[0]) for front, option in zip(starts, useful, strict=True)])
        time_s = np.concatenate([front[1] + option[1] for front, option in zip(starts, useful, strict=True)])
        last = np.repeat(np.arange(len(useful)), [len(front[0]) for front in starts])
        before = np.concatenate([np.arange(len(front[0])) for front in starts])
        # Keep those that are faster than all with less memory.
        order = np.lexsort((time_s, memory))
        fastest = np.minimum.accumulate(time_s[order])
        kept = order[np.concatenate(([True], fastest[1:] < fastest[:-1]))]
        fronts.append((memory[kept], time_s[kept], before[kept], [useful[number][2] for number in last[kept]]))
    return tuple(_plan_of_point(fronts, number) for number in range(len(fronts[-1][3])))


def _plan_of_point(fronts: Sequence[tuple[Indices, NDArray[np.float64], Indices, list[Segment]]], number: int) -> Plan:
    """Return the plan of a point of the last front, by following its segments to the start."""
    memory, time_s, before, last_segments = fronts[-1]
    memory_bytes, seconds, segments = int(memory[number]), float(time_s[number]), list[Segment]()
    while last_segments:
        segments.append(last_segments[number])
        number = int(before[number])
        _, _, before, last_segments = fronts[segments[-1].start]
    return Plan(memory_bytes, seconds, tuple(reversed(segments)))


def plan_within(graph: Graph, budget_bytes: int) -> tuple[Plan, tuple[int, ...]]:
    """Return the fastest plan within a budget, and the bytes that are in use while each of its segments runs.

    If no plan is within the budget, it is one whose segments exceed it by the fewest bytes in total.
    """
    best: list[tuple[int, float, int, Segment | None]] = [(0, 0.0, 0, None)]  # excess, seconds, bytes, last segment
    for segments in _segments(graph):
        points = (
            (best[segment.start][0] + max(memory - budget_bytes, 0), best[segment.start][1] + time_s, memory, segment)
            for memory, time_s, segment in segments
        )
        best.append(min(points, key=lambda point: point[:3]))
    _, time_s, memory, last = best[-1]
    chosen, sizes = list[Segment](), list[int]()
    while last is not None:
        chosen.append(last)
        sizes.append(memory)
        _, _, memory, last = best[last.start]
    needed = tuple(reversed(sizes)) or (0,)
    return Plan(max(needed), time_s, tuple(reversed(chosen))), needed


def _live_bytes(graph: Graph) -> list[int]:
    """Return for each start of a segment the bytes of earlier whole results that are needed from there on."""
    live = [0] * (len(graph) + 1)
    for index, operator in enumerate(graph.operators):
        for start in range(index + 1, min(graph.last_use[index], len(graph)) + 1):
            live[start] += operator.whole_bytes
    return live


def _segments(graph: Graph) -> Iterator[list[tuple[int, float, Segment]]]:
    """Yield for each number of operators the segments that end there, with all bytes in use and the seconds."""
    live = _live_bytes(graph)
    for stop in range(1, len(graph) + 1):
        segments = []
        for cut in cuts(graph, stop):
            for start, variant, needed, time_s in segment_costs(graph, stop, cut):
                segments.append((live[start] + needed, time_s, Segment(start, stop, variant)))
        yield segments


def closer(graph: Graph, plan: Plan) -> Plan:
    """Return a plan that needs no more memory, whose segments write results as close over earlier ones as they can.

    Each result that is written over another begins some rows before it. After many of these, the arena is larger than
    the most bytes in use at a time. The first variant runs where there is memory for it: the scratch of a later one,
    which may be torch's, is not part of the arena.
    """
    live, time_s, segments = _live_bytes(graph), plan.time_s, list[Segment]()
    for segment in plan.segments:
        if graph.operators[segment.start].is_barrier:
            segments.append(segment)
            continue
        # Segments of the same operators, by how many bytes their overlaps save, the most first.
        tried = cuts(graph, segment.stop) if _saved_bytes(graph, segment) else [segment.cut]
        seconds_of: dict[Segment, float] = {}
        ranked = []
        for start, cut, size_bytes, seconds in chain.from_iterable(
            segment_costs(graph, segment.stop, cut) for cut in tried
        ):
            if start != segment.start:
                continue
            alike = replace(segment, cut=cut)
            seconds_of[alike] = seconds
            if live[start] + size_bytes <= plan.memory_bytes:
                ranked.append((-_saved_bytes(graph, alike), cut.variant, size_bytes, seconds, alike))
        *_, chosen = min(ranked, key=lambda row: row[:4])
        segments.append(chosen)
        time_s += seconds_of[chosen] - seconds_of[segment]
    return replace(plan, time_s=time_s, segments=tuple(segments))


def _saved_bytes(graph: Graph, segment: Segment) -> int:
    """Return the bytes that the overlaps of a segment save, with all of its operators."""
    overlaps, current = Overlaps(graph, segment.stop, segment.cut), list[Overlap]()
    for index, ranges in graph.ranges(segment.start, segment.stop, segment.cut):
        current = overlaps.add(index, ranges)
    return sum(overlap.saved_bytes for overlap in current)


def undominated(points: Iterable[tuple[int, float, _T]]) -> list[tuple[int, float, _T]]:
    """Return the points (bytes, seconds, anything) that no other beats in both numbers, from the least bytes on."""
    kept: list[tuple[int, float, _T]] = []
    for point in sorted(points, key=lambda point: point[:2]):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
