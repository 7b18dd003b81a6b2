"""The algorithms of a schedule's convolutions chosen again, by their times in the schedule's own bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import mean
from typing import Any

from mucudnn.graph.convolution import Choice, Convolution
from mucudnn.graph.schedule import Schedule
from mucudnn.graph.timings import Timings, described, digest, named
from mucudnn.kernels.algorithm import Algorithm

_MOST_ROUNDS, _ROUNDS_S = 3, 4.0


def refined(
    schedule: Schedule,
    candidates: Mapping[int, Sequence[Algorithm]],
    arguments: tuple[Any, ...],
    limit_bytes: float,
    timings: Timings,
) -> Schedule:
    """Return the schedule with the fastest of the candidates for each convolution, which are timed in whole calls.

    candidates: of each convolution, by its index in ``schedule.operators``. Convolutions of the same problem that run
    in as many bands have the same algorithm. The schedule itself is returned where the other would need more than
    ``limit_bytes``, and where there is no time to measure.
    """
    kinds = {
        index: (one.problem, len(one.sources), segment.cut)
        for segment in schedule.plan.segments
        for index, one in enumerate(schedule.operators[segment.start : segment.stop], segment.start)
        if isinstance(one, Convolution)
    }
    own = {index: _convolution(schedule, index).algorithm(cut) for index, (_, _, cut) in kinds.items()}
    offered = {index: [own[index], *(one for one in candidates[index] if one is not own[index])] for index in kinds}
    timed = [(index, number) for index, of in offered.items() for number in range(len(of))]

    def measure() -> list[list[float]]:
        trials = [
            _schedule_with(schedule, {index: of[min(number, len(of) - 1)] for index, of in offered.items()})
            for number in range(max(map(len, offered.values()), default=0))
        ]
        end_s, rounds = timings.machine.clock.now() + min(_ROUNDS_S, timings.left_s), list[list[dict[int, float]]]()
        while not rounds or (len(rounds) < _MOST_ROUNDS and timings.machine.clock.now() < end_s):
            rounds.append([trial.operator_times(arguments) for trial in trials])
        return [[of_trial[number][index] for of_trial in rounds] for index, number in timed]

    names = [[named(one) for one in of] for of in offered.values()]
    samples = timings.of(f"convolutions in bands: {digest(f'{described(schedule)} {names}')}", measure)
    if samples is None:
        return schedule
    seconds: dict[object, dict[Algorithm | None, list[float]]] = {kind: {} for kind in kinds.values()}
    for (index, number), of_one in zip(timed, samples, strict=True):
        seconds[kinds[index]].setdefault(offered[index][number], []).extend(of_one)
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
