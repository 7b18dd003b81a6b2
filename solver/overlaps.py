"""Results that are written over tensors whose rows are read for the last time.

Where both are in memory they overlap, as far apart as no band needs what it or an earlier one overwrote: the diagonal
memory optimisation of Blacker, Bridges and Hadfield (*Diagonal Memory Optimisation for Machine Learning on
Micro-controllers*, 2020), for bands instead of whole operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mucudnn.solver.bands import Cut, Graph, Indices, Operator, Ranges


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
