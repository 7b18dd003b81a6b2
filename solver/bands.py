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
class Vertex:
    """An operator of a graph as the solver sees it: what it reads, makes and costs.

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

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """How many operators that read several rows are one after another up to each."""
        found: list[int] = []
        for one in self.operators:
            before = (found[source] for source in (*one.whole, *(reach.source for reach in one.reaches)))
            reads_several = any(bool((reach.last - reach.first > 1).any()) for reach in one.reaches)
            found.append(max(before, default=0) + reads_several)
        return tuple(found)

    def _may_be_segment(self, start: int, stop: int) -> bool:
        """Return whether operators are few enough for a segment."""
        depths = self.depths[start:stop]
        most = _MOST_IF_FLAT if max(depths) - min(depths) <= _MOST_DEPTH_IF_FLAT else MOST_OPERATORS
        return stop - start <= most

    def starts(self, stop: int) -> range:
        """Return the starts, from the last to the first, of the segments that may end before operator ``stop``."""
        start = stop - 1
        if not self.operators[start].is_barrier:
            while start > 0 and self._may_be_segment(start - 1, stop) and not self.operators[start - 1].is_barrier:
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
        found: dict[int, Ranges] = {}
        for index in range(stop - 1, start - 1, -1):
            readers = [(found[reader], reach) for reader, reach in self.readers[index] if reader < stop]
            found[index] = _ranges(self.operators[index], readers, self.is_whole(index, stop), cut)
            yield index, found[index]


def _ranges(operator: Vertex, readers: Sequence[tuple[Ranges, Reach | None]], is_whole: bool, cut: Cut) -> Ranges:
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
