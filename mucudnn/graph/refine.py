"""The algorithms of a schedule's convolutions chosen again, by their times in the schedule's own bands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import mean
from typing import Any

from mucudnn.graph.convolution import Choice, Convolution
from mucudnn.graph.schedule import Schedule
from mucudnn.kernels.algorithm import Algorithm

_MOST_ROUNDS, _ROUNDS_S = 3, 4.0


def refined(
    schedule: Schedule, candidates: Mapping[int, Sequence[Algorithm]], arguments: tuple[Any, ...], limit_bytes: float
) -> Schedule:
    """Return the schedule with the fastest of the candidates for each convolution, which are timed in whole calls.

    candidates: of each convolution, by its index in ``schedule.operators``. Convolutions of the same problem that run
    in as many bands have the same algorithm. The schedule itself is returned where the other would need more than
    ``limit_bytes``.
    """
    kinds = {
        index: (one.problem, len(one.sources), segment.cut)
        for segment in schedule.plan.segments
        for index, one in enumerate(schedule.operators[segment.start : segment.stop], segment.start)
        if isinstance(one, Convolution)
    }
    own = {index: _convolution(schedule, index).algorithm(cut) for index, (_, _, cut) in kinds.items()}
    offered = {index: [own[index], *(one for one in candidates[index] if one is not own[index])] for index in kinds}
    trials = [
        (_schedule_with(schedule, {index: of[min(number, len(of) - 1)] for index, of in offered.items()}), number)
        for number in range(max(map(len, offered.values()), default=0))
    ]
    seconds: dict[object, dict[Algorithm | None, list[float]]] = {kind: {} for kind in kinds.values()}
    start, rounds = time.perf_counter(), 0
    while rounds < 1 or (rounds < _MOST_ROUNDS and time.perf_counter() < start + _ROUNDS_S):
        for trial, number in trials:
            times = trial.operator_times(arguments)
            for index, kind in kinds.items():
                of = offered[index]
                if number < len(of):
                    seconds[kind].setdefault(of[number], []).append(times[index])
        rounds += 1
    fastest = {kind: min(of, key=lambda one: mean(of[one])) for kind, of in seconds.items()}
    found = _schedule_with(schedule, {index: fastest[kind] for index, kind in kinds.items()}, limit_bytes)
    return found if found.needed_bytes <= limit_bytes else schedule


def _schedule_with(
    schedule: Schedule, algorithms: Mapping[int, Algorithm | None], limit_bytes: float = inf
) -> Schedule:
    """Return the schedule with other algorithms of its convolutions, which become another variant of their choices."""
    known = max(len(_convolution(schedule, index).choices) for index in algorithms)
    for index, algorithm in algorithms.items():
        one = _convolution(schedule, index)
        padding = (one.choices[-1],) * (known - len(one.choices))
        one.choices = (*one.choices, *padding, Choice(algorithm, algorithm))
    segments = (replace(one, cut=replace(one.cut, variant=known)) for one in schedule.plan.segments)
    return Schedule(schedule.captured, schedule.graph, replace(schedule.plan, segments=tuple(segments)), limit_bytes)


def _convolution(schedule: Schedule, index: int) -> Convolution:
    one = schedule.operators[index]
    assert isinstance(one, Convolution)
    return one
