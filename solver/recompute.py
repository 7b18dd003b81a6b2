"""Results computed again before they are read much later, instead of being kept until then.

A tensor that is needed as a whole can be freed early, and computed again, band by band, where it is read, by a copy of
the operators of its segment (the rematerialization of Chen et al., *Training Deep Nets with Sublinear Memory Cost*,
2016, for inference). Which tensors these are is chosen greedily: each time one that is in use while much memory is, and
brings the plan closest to the budget, or saves the most time within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mucudnn.solver.bands import Graph, Planned, Segment, plan_within

_SEGMENTS, _CANDIDATES = 2, 3  # tried each time: those that need the most, and the largest results of each
_MOST_TENSORS = 16
_LEAST_GAIN = 0.02

Order = tuple[int, ...]  # operators in order of execution, by index, some of them more than once


def orders_within(graph: Graph, budget_bytes: int, enough_s: float) -> Iterator[Order]:
    """Yield orders of a graph's operators, each better than the one before, that compute results again.

    A plan of each needs less beyond the budget than one of the order before, or less time within it. enough_s: seconds
    that need not be improved.
    """
    order: Order = tuple(range(len(graph)))
    best = plan_within(graph, budget_bytes)
    for _ in range(_MOST_TENSORS):
        if best.excess_bytes == 0 and best.time_s <= enough_s:
            return
        for number in sorted(range(len(best.segments)), key=lambda number: -best.needed[number])[:_SEGMENTS]:
            repeating = _repeating(graph, order, best, best.segments[number])
            tried = [(plan_within(in_order(graph, one), budget_bytes), one) for one in repeating]
            found = min(tried, key=lambda one: (one[0].excess_bytes, one[0].time_s), default=None)
            if found is not None and _is_better(found[0], best):
                break
        else:
            return
        best, order = found
        yield order


def _is_better(found: Planned, best: Planned) -> bool:
    """Return whether a plan needs less beyond the budget, or less time and no more memory."""
    if found.excess_bytes < (1 - _LEAST_GAIN) * best.excess_bytes:
        return True
    return found.excess_bytes <= best.excess_bytes and found.time_s < (1 - _LEAST_GAIN) * best.time_s


def in_order(graph: Graph, order: Sequence[int]) -> Graph:
    """Return the graph that runs its operators in this order. Each reads what ran last of those that it may read."""
    numbers: dict[int, int] = {}
    made = []
    for number, index in enumerate(order):
        one = graph.operators[index]
        made.append(
            replace(
                one,
                reaches=tuple(replace(reach, source=numbers[reach.source]) for reach in one.reaches),
                whole=tuple(map(numbers.__getitem__, one.whole)),
                aliases=tuple(map(numbers.__getitem__, one.aliases)),
            )
        )
        numbers[index] = number
    return Graph(made, graph.samples)


def _repeating(graph: Graph, order: Order, planned: Planned, during: Segment) -> Iterator[Order]:
    """Yield orders that also compute a result again that is needed as a whole during a segment: the largest first."""
    current = in_order(graph, order)
    segment_of = {index: one for one in planned.segments for index in range(one.start, one.stop)}
    alive = [
        index
        for index in current.may_be_overwritten
        if index < during.stop and current.last_use[index] >= max(during.start, segment_of[index].stop)
    ]
    number = 0
    for index in sorted(alive, key=lambda index: -current.operators[index].whole_bytes):
        start, first = segment_of[index].start, during.start if index < during.start else during.stop
        later = [(reader, reach) for reader, reach in current.readers[index] if reader >= first]
        if number < _CANDIDATES and all(reach is not None for _, reach in later):
            before = min(reader for reader, _ in later)
            again = _needed(current, index, start, before)
            yield _without_unread(graph, [*order[:before], *(order[one] for one in again), *order[before:]])
            number += 1


def _needed(graph: Graph, index: int, start: int, before: int) -> list[int]:
    """Return the operators that compute a result again from what is there before an operator.

    These are those from ``start`` on, and earlier ones whose results are larger than what they read.
    """

    def again(source: int) -> bool:
        one = graph.operators[source]
        if one.is_barrier or graph.last_use[source] >= before:
            return False
        return source >= start or sum(_size(graph, reach.source) for reach in one.reaches) < _size(graph, source)

    found = {index}
    for one in range(index, 0, -1):
        if one in found:
            found.update(reach.source for reach in graph.operators[one].reaches if again(reach.source))
    return sorted(found)


def _size(graph: Graph, index: int) -> int:
    return graph.operators[index].rows * graph.operators[index].row_bytes


def _without_unread(graph: Graph, order: Sequence[int]) -> Order:
    """Return an order without operators whose results are computed again before they are read."""
    kept: list[int] = []
    read: set[int] = set()
    for index in reversed(order):
        one = graph.operators[index]
        if one.is_barrier or one.is_result or not graph.readers[index] or index in read:
            kept.append(index)
            read.discard(index)
            read.update((*one.whole, *(reach.source for reach in one.reaches)))
    return tuple(reversed(kept))
