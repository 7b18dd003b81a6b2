"""Inference in bands of rows: how to cut a graph of operators into segments, and each segment into bands.

A *segment* is a range of the graph's operators, in their order, that runs band by band: each band computes some rows
of its last results, and of all others the rows that these need. Results that operators after the segment read are
complete ("whole"). Inside a segment only a band's rows are held. Rows that a later band needs again are either kept
(line buffers) or computed again.

    memory = max over segments of (whole results alive + bands of the results inside + kept rows + scratch - overlaps)
    time   = sum over segments, bands and operators of (seconds per call + rows * seconds per row)

A result may be written over an earlier one whose rows are read for the last time: where both are in memory they
*overlap*, as far apart as no band needs what it or an earlier one overwrote (Blacker, Bridges and Hadfield, *Diagonal
Memory Optimisation*, 2020, for whole operators).

``plans`` finds the exact Pareto front of both over all cuts, numbers of bands and ways to treat such rows, by dynamic
programming over the order of the operators. Depth-first execution of layers is due to Alwani et al., *Fused-layer CNN
accelerators* (2016), and within a bound on memory to Lin et al., *MCUNetV2* (2021), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mucudnn.words.errors import InvalidInputError

TILE_ROWS = 48  # bands of more than two are as many whole ones: tiles of Winograd algorithms have 2, 4 or 6 rows
MOST_OPERATORS = 48  # of a segment; deeper ones hold too many rows to be of use

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reach:
    """The rows of a tensor that an operator reads: row i of its result needs rows first[i] to last[i] - 1.

    source: index of the operator that computes the tensor. first, last: (rows of the result,), not decreasing.
    """

    source: int
    first: Indices
    last: Indices


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of an operator in seconds and bytes, each a number for a call, and one for each row of one sample.

    prepared_bytes: what all bands of a segment share, such as a transformed filter, made in ``setup_s``.
    """

    call_s: float = 0.0
    row_s: float = 0.0
    setup_s: float = 0.0
    scratch_bytes: int = 0
    scratch_row_bytes: int = 0
    prepared_bytes: int = 0

    def seconds(self, rows: int) -> float:
        """Return the seconds of a call for so many rows, without the setup."""
        return self.call_s + self.row_s * rows


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a graph, by what it reads, makes and costs.

    reaches: the tensors of which it needs some rows. whole: indices of the operators whose complete results it needs.
    rows: the number of rows of its result for each sample; 0 for a barrier, which is computed at once. row_bytes: of
    a row of one sample. whole_bytes: of the complete result; 0 if it is not counted. is_result: whether it is a
    result of the graph.
    """

    reaches: tuple[Reach, ...]
    whole: tuple[int, ...]
    rows: int
    row_bytes: int
    whole_bytes: int
    costs: tuple[Costs, ...]
    whole_costs: tuple[Costs, ...] = ()
    align: int = 1
    is_result: bool = False
    aliases: tuple[int, ...] = ()

    def costs_of(self, cut: Cut) -> Costs:
        """Return the costs in a segment that is cut in this way."""
        costs = self.whole_costs if self.whole_costs and cut.bands == 1 else self.costs
        return costs[min(cut.variant, len(costs) - 1)]

    @property
    def is_barrier(self) -> bool:
        return self.rows == 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The cut of a segment: at most ``samples`` samples a band, in ``bands`` bands of rows each.

    keeps: whether rows that later bands need are kept; otherwise they are computed again. variant: which of several
    costs its operators have, which are those of other algorithms.
    """

    samples: int
    bands: int
    keeps: bool = True
    variant: int = 0


@dataclass(frozen=True, slots=True)
class Segment:
    """Operators ``start`` to ``stop`` - 1, run band by band."""

    start: int
    stop: int
    cut: Cut


@dataclass(frozen=True, slots=True)
class Plan:
    """A way to run a graph: segments in order, with the predicted memory and time."""

    memory_bytes: int
    time_s: float
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Ranges:
    """The rows of one operator's result in each band: (bands,) each.

    Band k holds rows low[k] to high[k] - 1, of which it computes those from new[k] on.
    """

    low: Indices
    new: Indices
    high: Indices

    @property
    def computed(self) -> Indices:
        return self.high - self.new

    @property
    def held(self) -> int:
        """The largest number of rows that a band holds."""
        return int((self.high - self.low).max())

    @property
    def kept(self) -> int:
        """The largest number of rows that a band takes over from the one before."""
        return int((np.where(self.high > self.low, self.new - self.low, 0)).max())


@dataclass(frozen=True, slots=True)
class Overlap:
    """The result of operator ``written`` may overlap that of ``read``, which its segment reads for the last time.

    distance_bytes: by which the latter starts at least behind the former. saved_bytes: what both need less together.
    """

    read: int
    written: int
    distance_bytes: int
    saved_bytes: int


class Graph:
    """A graph of operators in the order of execution, for batches of ``samples`` samples."""

    def __init__(self, operators: Sequence[Operator], samples: int) -> None:
        self.operators, self.samples = tuple(operators), samples
        self.variants = max((max(len(one.costs), len(one.whole_costs)) for one in operators), default=1)
        for index, operator in enumerate(self.operators):
            if any(source >= index for source in (*operator.whole, *(reach.source for reach in operator.reaches))):
                raise InvalidInputError(f"operator {index} reads a result of a later one")

    def __len__(self) -> int:
        return len(self.operators)

    @cached_property
    def readers(self) -> tuple[tuple[tuple[int, Reach | None], ...], ...]:
        """The readers of each operator's result, with the rows that they need; None for all."""
        found: list[list[tuple[int, Reach | None]]] = [[] for _ in self.operators]
        for index, operator in enumerate(self.operators):
            for reach in operator.reaches:
                found[reach.source].append((index, reach))
            for source in operator.whole:
                found[source].append((index, None))
        return tuple(map(tuple, found))

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """The index of the last operator that needs each result, also through views of it; ``len`` for the graph's."""
        ends = [len(self) if one.is_result else index for index, one in enumerate(self.operators)]
        for index in reversed(range(len(self))):
            operator = self.operators[index]
            for source in (*operator.whole, *(reach.source for reach in operator.reaches)):
                ends[source] = max(ends[source], index)
            for source in operator.aliases:
                ends[source] = max(ends[source], ends[index])
        return tuple(ends)

    @cached_property
    def may_be_overwritten(self) -> frozenset[int]:
        """The results in rows that are not results of the graph, and of which there are no views."""
        viewed = {source for one in self.operators for source in one.aliases}
        every = enumerate(self.operators)
        return frozenset(i for i, one in every if one.row_bytes and one.whole_bytes and not one.is_result) - viewed

    def starts(self, stop: int) -> range:
        """Return the starts, from the last to the first, of the segments that may end before operator ``stop``."""
        start = stop - 1
        if not self.operators[start].is_barrier:
            while start > 0 and stop - start < MOST_OPERATORS and self._joins(start - 1, stop):
                start -= 1
        return range(stop - 1, start - 1, -1)

    def _joins(self, index: int, stop: int) -> bool:
        if self.operators[index].is_barrier:
            return False
        return not any(reach is None and reader < stop for reader, reach in self.readers[index])

    def is_whole(self, index: int, stop: int) -> bool:
        """Return whether the result of an operator in a segment before ``stop`` is needed after the segment."""
        return self.last_use[index] >= stop

    def ranges(self, start: int, stop: int, cut: Cut) -> Iterator[tuple[int, Ranges]]:
        """Yield operators of a segment from the last to the first, with their rows in each band.

        The rows do not depend on ``start``, since they follow from those of later operators.
        """
        found: dict[int, Ranges] = {}
        for index in range(stop - 1, start - 1, -1):
            readers = [(found[reader], reach) for reader, reach in self.readers[index] if reader < stop]
            found[index] = _ranges(self.operators[index], readers, self.is_whole(index, stop), cut)
            yield index, found[index]


def _ranges(operator: Operator, readers: Sequence[tuple[Ranges, Reach | None]], is_whole: bool, cut: Cut) -> Ranges:
    """Return the rows of an operator's result, given those of its readers in the segment.

    is_whole: whether all rows are needed after the segment; such rows are never computed twice.
    """
    rows, align = operator.rows, operator.align
    if cut.bands == 1:
        return Ranges(*(np.array([row]) for row in (0, 0, rows)))
    if not readers:
        height = -(-rows // (cut.bands * align)) * align
        if height > TILE_ROWS // 2:
            height = -(-height // (TILE_ROWS * align)) * TILE_ROWS * align
        high = np.minimum(np.arange(1, cut.bands + 1) * height, rows)
        new = np.concatenate(([0], high[:-1]))
        return Ranges(new, new, high)
    high = np.zeros(cut.bands, np.int64)
    low = np.full(cut.bands, rows)
    for of_reader, reach in readers:
        assert reach is not None
        reads = of_reader.high > of_reader.new
        last = reach.last.take(of_reader.high - 1, mode="clip")
        first = reach.first.take(of_reader.new, mode="clip")
        high = np.maximum(high, np.where(reads, last, 0))
        low = np.minimum(low, np.where(reads, first, rows))
    high = np.minimum(-(-np.maximum.accumulate(high) // align) * align, rows)
    if is_whole:
        high[-1] = rows
    if cut.keeps or is_whole:
        new = np.concatenate(([0], high[:-1]))
        low = np.minimum.accumulate(low[::-1])[::-1]
        return Ranges(np.minimum(low, new), new, high)
    low = np.minimum(low, high) // align * align
    return Ranges(low, low, high)


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
            for memory, time_s, segment in _undominated(of_start)
        ]
        fronts.append(_merged(found))
    return tuple(_plan(fronts, number) for number in range(len(fronts[-1].last)))


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan that needs the least beyond a budget, summed over segments, and of such plans the fastest.

    needed: the bytes that are in use while each segment runs.
    """

    excess_bytes: int
    time_s: float
    segments: tuple[Segment, ...]
    needed: tuple[int, ...]


def plan_within(graph: Graph, budget_bytes: int) -> Planned:
    """Return the fastest plan within a budget; if there is none, one that exceeds it least."""
    best: list[tuple[int, float, int, Segment | None]] = [(0, 0.0, 0, None)]  # excess, seconds, bytes, last segment
    for of_stop in _segments(graph):
        best.append(
            min(
                (
                    (best[one.start][0] + max(memory - budget_bytes, 0), best[one.start][1] + time_s, memory, one)
                    for memory, time_s, one in of_stop
                ),
                key=lambda found: found[:3],
            )
        )
    segments, needed = list[Segment](), list[int]()
    last = best[-1]
    while last[3] is not None:
        segments.insert(0, last[3])
        needed.insert(0, last[2])
        last = best[last[3].start]
    return Planned(*best[-1][:2], tuple(segments), tuple(needed))


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


def _undominated(points: Sequence[tuple[int, float, Segment]]) -> list[tuple[int, float, Segment]]:
    """Return the points (bytes, seconds, segment) that no other point beats in both, from the least bytes on."""
    kept: list[tuple[int, float, Segment]] = []
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
