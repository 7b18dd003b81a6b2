"""Recomputation: results that are freed early and computed again where they are read, instead of being kept.

The operators that compute such a result occur more than once in the order of execution (compare Chen et al., *Training
Deep Nets with Sublinear Memory Cost*, 2016). Results are chosen greedily, among the largest of the segments that need
the most memory: each time the one that brings the plan closest to the budget, or saves the most time within it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mucudnn.solver.bands import Graph, Segment
from mucudnn.solver.plans import Plan, plan_within

_SEGMENTS, _CANDIDATES = 2, 3  # tried each time: those that need the most, and the largest results of each
_MOST_TENSORS = 16
_LEAST_GAIN = 0.02

Order = tuple[int, ...]  # operators in order of execution, by index, some of them more than once


def orders_within(graph: Graph, budget_bytes: int, enough_s: float) -> Iterator[Order]:
    """Yield orders of a graph's operators that recompute results, each better than the one before.

    Better is a plan that exceeds the budget by fewer bytes, or a faster one that exceeds it by no more.

    enough_s: the seconds of a plan within the budget that need not be improved.
    """

    def planned(order: Order) -> _Planned:
        plan, needed = plan_within(in_order(graph, order), budget_bytes)
        return _Planned(order, plan, needed, sum(max(size - budget_bytes, 0) for size in needed))

    best = planned(tuple(range(len(graph))))
    for _ in range(_MOST_TENSORS):
        if best.excess_bytes == 0 and best.plan.time_s <= enough_s:
            return
        largest = sorted(zip(best.needed, best.plan.segments, strict=True), key=lambda pair: -pair[0])
        for _, segment in largest[:_SEGMENTS]:
            candidates = map(planned, _repeating(graph, best, segment))
            least = min(candidates, key=lambda candidate: (candidate.excess_bytes, candidate.plan.time_s), default=best)
            is_smaller = least.excess_bytes < (1 - _LEAST_GAIN) * best.excess_bytes
            is_faster = least.plan.time_s < (1 - _LEAST_GAIN) * best.plan.time_s
            if is_smaller or (is_faster and least.excess_bytes <= best.excess_bytes):
                break
        else:
            return
        best = least
        yield best.order


class _Planned(NamedTuple):
    """An order with its plan.

    needed: the bytes of each segment.
    excess_bytes: beyond the budget, in all segments.
    """

    order: Order
    plan: Plan
    needed: tuple[int, ...]
    excess_bytes: int


def in_order(graph: Graph, order: Sequence[int]) -> Graph:
    """Return the graph that runs its operators in this order. Each reads what ran last of those that it may read."""
    numbers: dict[int, int] = {}
    operators = []
    for number, index in enumerate(order):
        operator = graph.operators[index]
        operators.append(
            replace(
                operator,
                reaches=tuple(replace(reach, source=numbers[reach.source]) for reach in operator.reaches),
                whole=tuple(map(numbers.__getitem__, operator.whole)),
                aliases=tuple(map(numbers.__getitem__, operator.aliases)),
            )
        )
        numbers[index] = number
    return Graph(operators, graph.samples)


def _repeating(graph: Graph, planned: _Planned, during: Segment) -> Iterator[Order]:
    """Yield orders that recompute another of the results that are whole during a segment, the largest first."""
    order = planned.order
    current = in_order(graph, order)
    segment_of = {index: segment for segment in planned.plan.segments for index in range(segment.start, segment.stop)}
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
            repeated = [order[place] for place in _needed(current, index, start, before)]
            yield _without_unread(graph, [*order[:before], *repeated, *order[before:]])
            number += 1


def _needed(graph: Graph, index: int, start: int, before: int) -> list[int]:
    """Return the operators that recompute a result from what is in memory before operator ``before``.

    They are those of the result's own segment, which begins at ``start``, and earlier ones whose results are larger
    than what they read.
    """
    sizes = [operator.rows * operator.row_bytes for operator in graph.operators]
    needed = {index}
    for reader in range(index, 0, -1):
        if reader not in needed:
            continue
        for source in (reach.source for reach in graph.operators[reader].reaches):
            operator = graph.operators[source]
            is_larger = sum(sizes[reach.source] for reach in operator.reaches) < sizes[source]
            if not operator.is_barrier and graph.last_use[source] < before and (source >= start or is_larger):
                needed.add(source)
    return sorted(needed)


def _without_unread(graph: Graph, order: Sequence[int]) -> Order:
    """Return an order without operators whose results are recomputed before anything reads them."""
    kept: list[int] = []
    read: set[int] = set()
    for index in reversed(order):
        operator = graph.operators[index]
        if operator.is_barrier or operator.is_result or not graph.readers[index] or index in read:
            kept.append(index)
            read.discard(index)
            read.update((*operator.whole, *(reach.source for reach in operator.reaches)))
    return tuple(reversed(kept))
