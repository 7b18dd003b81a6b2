"""A network's least time by its workspace: within one budget for all problems, or a limit for each."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.records import Configuration
from mucudnn.solver.division import TIME_LIMIT_S, DivisionProblem, check_limits
from mucudnn.solver.knapsack import breakpoints

Key = TypeVar("Key", bound=Hashable)

POINTS = 12


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A network's least time within a workspace budget, or limit, of ``size_bytes``."""

    size_bytes: int
    time_s: float


def budget_curve(
    options: Mapping[Key, Sequence[Configuration]],
    counts: Mapping[Key, int] | None = None,
    *,
    points: int = POINTS,
    budgets: Iterable[int] = (),
    time_limit_s: float | None = TIME_LIMIT_S,
) -> tuple[CurvePoint, ...]:
    """Return a network's least time at budgets from the smallest feasible one up to the largest that saves time.

    The times are those of ``solve_wd``, and a larger budget is never slower. The curve has at most ``points`` budgets
    (at least 2), and ``budgets`` in addition. The budgets are breakpoints of the linear relaxation, at which the bounds
    alone prove the answer; if there are more than ``points``, they are sampled at even steps of time and bytes.
    ``time_limit_s`` applies to each point.

    Raises the errors of ``solve_wd``.
    """
    check_limits(None, time_limit_s)
    problem = DivisionProblem.of(options, counts)
    turns = _spread(breakpoints(problem.rows), points)
    found: list[CurvePoint] = []
    for budget in sorted({*turns, *budgets}):
        check_limits(budget, None)
        time_s = problem.divide(budget, time_limit_s).objective_s
        found.append(CurvePoint(budget, min(time_s, found[-1].time_s) if found else time_s))  # after a timeout
    return tuple(found)


def limit_curve(
    options: Mapping[Key, Sequence[Configuration]],
    counts: Mapping[Key, int],
    *,
    points: int = POINTS,
    limits: Iterable[int] = (),
) -> tuple[CurvePoint, ...]:
    """Return a network's least time at limits of each problem, from the smallest feasible one up.

    The curve has at most ``points`` limits (at least 2), and the feasible ones of ``limits`` in addition.
    """
    smallest = max((min(c.workspace_bytes for c in each) for each in options.values()), default=0)

    def time_s(limit: int) -> float:
        fitting = ((counts[key], [c for c in each if c.workspace_bytes <= limit]) for key, each in options.items())
        return sum(count * min(c.time_s for c in few) for count, few in fitting)

    sizes = {smallest, *(c.workspace_bytes for each in options.values() for c in each)}
    turns = [(size, time_s(size)) for size in sorted(sizes) if size >= smallest]
    falling = [turn for i, turn in enumerate(turns) if i == 0 or turn[1] < turns[i - 1][1]]
    wanted = _spread(falling, points) | {limit for limit in limits if limit >= smallest}
    return tuple(CurvePoint(limit, time_s(limit)) for limit in sorted(wanted))


def _spread(turns: Sequence[tuple[int, float]], most: int) -> set[int]:
    """Return the bytes of at most ``most`` points of a decreasing curve, at even steps along it, with both ends."""
    if most < 2:
        raise InvalidInputError(f"points is {most}; a curve has at least 2")
    if len(turns) <= most:
        return {size for size, _ in turns}
    (first_bytes, first_time), (last_bytes, last_time) = turns[0], turns[-1]
    width, height = last_bytes - first_bytes, first_time - last_time
    along = [(size - first_bytes) / width + (first_time - time) / height for size, time in turns]
    wanted = [along[-1] * i / (most - 1) for i in range(most)]
    nearest = (min(range(len(turns)), key=lambda i: abs(along[i] - at)) for at in wanted)
    return {turns[i][0] for i in nearest}
