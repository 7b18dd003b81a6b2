"""Graphs of operators that run in bands of rows, and the rows that each operator computes in each band.

A *segment* is a range of the graph's operators, in their order, that runs band by band: each band computes some rows
of its last results, and of all others the rows that these need. Results that operators after the segment read are
complete ("whole"). Inside a segment only a band's rows are held. Rows that a later band needs again are either kept
(line buffers) or computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mucudnn.core.errors import InvalidInputError

_MULTIPLE = 48  # rows: whole tiles of Winograd algorithms (2, 4 or 6 rows) where a model has halved its rows, too
MOST_OPERATORS = 48  # of a segment; deeper ones hold too many rows to be of use
_MOST_IF_FLAT = 400  # if its operators read few rows beyond their own, one after another, as in an unrolled loop
_MOST_DEPTH_IF_FLAT = 24  # of those that read other rows than their own

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reach:
    """The rows of a tensor that an operator reads: row i of its result needs rows first[i] to last[i] - 1.

    source: index of the operator that computes the tensor.
    first: (rows of the result,), not decreasing.
    last: likewise.
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
class Vertex:
    """An operator of a graph as the solver sees it: what it reads, makes and costs.

    reaches: the tensors of which it needs some rows.
    whole: indices of the operators whose complete results it needs.
    rows: the number of rows of its result for each sample; 0 for a barrier, which is computed at once.
    row_bytes: of a row of one sample.
    whole_bytes: of the complete result; 0 if it is not counted.
    costs: of each variant; if there are fewer than variants, the last ones are those of all others.
    whole_costs: the same in segments of a single band; empty if they do not differ.
    align: the rows of a band begin and end at multiples of it.
    is_result: whether it is a result of the graph.
    aliases: indices of the operators of whose results this one is a view.
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
    """The cut of a segment: at most ``samples`` samples a band, in ``bands`` bands of rows; at least one of both is 1.

    keeps: whether rows that later bands need are kept; otherwise they are computed again.
    variant: which of several costs its operators have, which are those of other algorithms.
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


class Graph:
    """A graph of operators in the order of execution, for batches of ``samples`` samples."""

    def __init__(self, operators: Sequence[Vertex], samples: int) -> None:
        self.operators, self.samples = tuple(operators), samples
        self.variants = max((max(len(vertex.costs), len(vertex.whole_costs)) for vertex in operators), default=1)
        for index, operator in enumerate(self.operators):
            if any(source >= index for source in (*operator.whole, *(reach.source for reach in operator.reaches))):
                raise InvalidInputError(f"operator {index} reads a result of a later one")

    def __len__(self) -> int:
        return len(self.operators)

    @cached_property
    def readers(self) -> tuple[tuple[tuple[int, Reach | None], ...], ...]:
        """The readers of each operator's result, with the rows that they need; None for all."""
        readers: list[list[tuple[int, Reach | None]]] = [[] for _ in self.operators]
        for index, operator in enumerate(self.operators):
            for reach in operator.reaches:
                readers[reach.source].append((index, reach))
            for source in operator.whole:
                readers[source].append((index, None))
        return tuple(map(tuple, readers))

    @cached_property
    def last_use(self) -> tuple[int, ...]:
        """The index of the last operator that needs each result, also through views of it; ``len`` for the graph's."""
        ends = [len(self) if operator.is_result else index for index, operator in enumerate(self.operators)]
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
        viewed = {source for operator in self.operators for source in operator.aliases}
        return frozenset(
            index
            for index, operator in enumerate(self.operators)
            if operator.row_bytes and operator.whole_bytes and not operator.is_result and index not in viewed
        )

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many operators that read several rows are one after another up to each."""
        depths: list[int] = []
        for operator in self.operators:
            before = (depths[source] for source in (*operator.whole, *(reach.source for reach in operator.reaches)))
            reads_several = any(bool((reach.last - reach.first > 1).any()) for reach in operator.reaches)
            depths.append(max(before, default=0) + reads_several)
        return tuple(depths)

    def starts(self, stop: int) -> range:
        """Return the starts, from the last to the first, of the segments that may end before operator ``stop``."""
        start = stop - 1
        while start > 0 and not self.operators[start].is_barrier and not self.operators[start - 1].is_barrier:
            depths = self.depths[start - 1 : stop]
            is_flat = max(depths) - min(depths) <= _MOST_DEPTH_IF_FLAT
            if len(depths) > (_MOST_IF_FLAT if is_flat else MOST_OPERATORS):
                break
            if any(reach is None and reader < stop for reader, reach in self.readers[start - 1]):
                break
            start -= 1
        return range(stop - 1, start - 1, -1)

    def is_whole(self, index: int, stop: int) -> bool:
        """Return whether the result of an operator in a segment before ``stop`` is needed after the segment."""
        return self.last_use[index] >= stop

    def ranges(self, start: int, stop: int, cut: Cut) -> Iterator[tuple[int, Ranges]]:
        """Yield operators of a segment from the last to the first, with their rows in each band.

        The rows do not depend on ``start``, since they follow from those of later operators.
        """
        ranges: dict[int, Ranges] = {}
        for index in range(stop - 1, start - 1, -1):
            readers = [(ranges[reader], reach) for reader, reach in self.readers[index] if reader < stop]
            ranges[index] = _ranges(self.operators[index], readers, cut, is_whole=self.is_whole(index, stop))
            yield index, ranges[index]


def _ranges(operator: Vertex, readers: Sequence[tuple[Ranges, Reach | None]], cut: Cut, *, is_whole: bool) -> Ranges:
    """Return the rows of an operator's result, given those of its readers in the segment.

    is_whole: whether all rows are needed after the segment; such rows are never computed twice.
    """
    rows, align = operator.rows, operator.align
    if cut.bands == 1:
        return Ranges(*(np.array([row]) for row in (0, 0, rows)))
    if not readers:
        height = -(-rows // (cut.bands * align)) * align
        if height > _MULTIPLE // 2:
            height = -(-height // (_MULTIPLE * align)) * _MULTIPLE * align
        high = np.minimum(np.arange(1, cut.bands + 1) * height, rows)
        new = np.concatenate(([0], high[:-1]))
        return Ranges(new, new, high)
    high = np.zeros(cut.bands, np.int64)
    low = np.full(cut.bands, rows)
    for reader, reach in readers:
        assert reach is not None
        reads = reader.high > reader.new
        last = reach.last.take(reader.high - 1, mode="clip")
        first = reach.first.take(reader.new, mode="clip")
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
