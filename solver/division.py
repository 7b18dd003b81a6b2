"""Workspace division (WD): one budget divided over all problems of a network (Oyama et al., μ-cuDNN, section III).

One configuration is chosen for each problem, so that the sum of times is minimal and the sum of workspaces is within
the budget: a multiple-choice knapsack problem. ``knapsack.py`` solves it in whole picoseconds and bytes, so the answer
depends neither on the tolerances of an external solver nor on the order of the input. Curves are a network's least time
by its budget, or by a limit for each problem.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Generic, TypeVar

from mucudnn.core.answers import Answer, Status
from mucudnn.core.errors import InfeasibleError, InvalidInputError
from mucudnn.core.records import Configuration
from mucudnn.core.values import exact_bytes, format_bytes, format_seconds
from mucudnn.solver.front import PICOSECONDS
from mucudnn.solver.knapsack import Row, breakpoints, integer_program, pulp_without_warnings, solve, total, undominated

Key = TypeVar("Key", bound=Hashable)

_LONGEST = 100  # maximum length of a variable's name in a file
NAMED = 5  # number of problems that a message lists
TIME_LIMIT_S = 60.0  # An external solver might not terminate.


@dataclass(frozen=True, slots=True, kw_only=True)
class Division(Answer, Generic[Key]):
    """The configuration chosen for each problem of a network, and how they were found; ``str`` describes this in words.

    ``objective_s`` is the sum of count x time.

    options: the configurations of each problem to choose from.
    undominated_options: their number without dominated ones.
    remaining_options: their number after elimination by bounds.
    notes: timeouts and failures of external solvers.
    """

    assignment: Mapping[Key, Configuration]
    options: Mapping[Key, Sequence[Configuration]] = field(repr=False)
    counts: Mapping[Key, int]
    budget_bytes: int | None
    undominated_options: int
    remaining_options: int
    solver: str
    notes: tuple[str, ...] = ()

    @property
    def workspace_bytes(self) -> int:
        """The sum of the workspaces of all problems' configurations."""
        return sum(configuration.workspace_bytes for configuration in self.assignment.values())

    def to_json(self) -> dict[str, object]:
        """Return the chosen configurations and all figures as plain values for ``json.dumps``; names have units."""
        rows = [
            {
                "problem": str(key),
                "count": self.counts[key],
                "configuration": str(configuration),
                "time_s": configuration.time_s,
                "workspace_bytes": configuration.workspace_bytes,
            }
            for key, configuration in self.assignment.items()
        ]
        return {
            **self.proof(),
            "budget_bytes": self.budget_bytes,
            "workspace_bytes": self.workspace_bytes,
            "problems": len(rows),
            "options": sum(map(len, self.options.values())),
            "undominated_options": self.undominated_options,
            "remaining_options": self.remaining_options,
            "solver": self.solver,
            "notes": list(self.notes),
            "assignment": rows,
        }

    def __str__(self) -> str:
        options = sum(map(len, self.options.values()))
        text = (
            f"{len(self.assignment)} problems: {format_seconds(self.objective_s)} in "
            f"{format_bytes(self.workspace_bytes)} (budget {format_bytes(self.budget_bytes)}), {self.verdict}; "
            f"{options} options, {self.undominated_options} not dominated, {self.remaining_options} within the "
            f"bounds; {self.solver}, {format_seconds(self.solve_time_s)}"
        )
        return "\n".join((text, *self.notes))

    def program(self, suffix: str) -> str:
        """Return the integer program as the text of an ``.lp`` or ``.mps`` file: see ``DivisionProblem.program``."""
        return DivisionProblem.of(self.options, self.counts).program(self.budget_bytes, suffix)


@dataclass(frozen=True, slots=True)
class DivisionProblem(Generic[Key]):
    """The configurations of each problem, checked and converted to whole numbers, ready to be solved for any budget.

    ``configurations`` of each problem are in the order of their names; ``rows`` are those that no other dominates in
    time and workspace.
    """

    counts: Mapping[Key, int]
    configurations: Sequence[Sequence[Configuration]]
    rows: list[list[Row]]

    @staticmethod
    def of(options: Mapping[Key, Sequence[Configuration]], counts: Mapping[Key, int] | None) -> DivisionProblem[Key]:
        """Check the configurations of each problem, and convert them to whole numbers.

        Raises the errors of ``solve_wd``, except those for budget and time limit.
        """
        keys = sorted(options, key=repr)
        counts = dict.fromkeys(keys, 1) if counts is None else counts
        _check(options, counts)
        named = [sorted(options[key], key=lambda c: (str(c), c.micro_configs)) for key in keys]
        rows = [
            undominated(
                (c.workspace_bytes, counts[key] * round(c.time_s * PICOSECONDS), len(c.micro_configs), rank)
                for rank, c in enumerate(configurations)
            )
            for key, configurations in zip(keys, named, strict=True)
        ]
        return DivisionProblem({key: counts[key] for key in keys}, named, rows)

    def program(self, budget_bytes: int | None, suffix: str = ".lp") -> str:
        """Return the integer linear program as text, in CPLEX's LP format or, if suffix is ``.mps``, in MPS format.

        A variable is named after the number of its problem, its own number and its configuration. Times are whole
        picoseconds, multiplied by the counts of the problems.
        """
        names = [
            [f"x_{i}_{j}_{re.sub(r'[^A-Za-z0-9]+', '_', str(named[row[3]]))}"[:_LONGEST] for j, row in enumerate(rows)]
            for i, (named, rows) in enumerate(zip(self.configurations, self.rows, strict=True))
        ]
        with pulp_without_warnings(), TemporaryDirectory() as folder:
            program, _ = integer_program(self.rows, budget_bytes, names)
            file = Path(folder) / "program"
            write = program.writeMPS if suffix == ".mps" else program.writeLP
            write(str(file))
            return file.read_text()

    def divide(self, budget_bytes: int | None, time_limit_s: float | None) -> Division[Key]:
        """Choose a configuration for each problem within one budget, as ``solve_wd`` does."""
        start = time.perf_counter()
        deadline = math.inf if time_limit_s is None else start + time_limit_s
        smallest = sum(rows[0][0] for rows in self.rows)
        if budget_bytes is not None and budget_bytes < smallest:
            least = {key: rows[0][0] for key, rows in zip(self.counts, self.rows, strict=True)}
            largest = sorted(least, key=lambda key: -least[key])
            needs = [f"{key} (at least {exact_bytes(least[key])})" for key in largest if least[key]]
            raise InfeasibleError(
                f"the workspace budget of {exact_bytes(budget_bytes)} is too small for {len(least)} problems: the "
                f"smallest feasible budget is {exact_bytes(smallest)}; allow at least that much. The largest needs: "
                f"{_some(needs)}",
                smallest_feasible_bytes=smallest,
            )
        enough = sum(rows[-1][0] for rows in self.rows)  # for the fastest configuration of every problem
        answer = solve(self.rows, enough if budget_bytes is None else budget_bytes, deadline)
        chosen = [named[row[3]] for named, row in zip(self.configurations, answer.rows, strict=True)]
        return Division(
            objective_s=total(answer.rows)[1] / PICOSECONDS,
            bound_s=answer.bound_ps / PICOSECONDS,
            status=Status.OPTIMAL if answer.proven else Status.FEASIBLE,
            solve_time_s=time.perf_counter() - start,
            assignment=dict(zip(self.counts, chosen, strict=True)),
            options=dict(zip(self.counts, self.configurations, strict=True)),
            counts=self.counts,
            budget_bytes=budget_bytes,
            undominated_options=sum(map(len, self.rows)),
            remaining_options=answer.remaining_options,
            solver=answer.solver,
            notes=answer.notes,
        )


def solve_wd(
    options: Mapping[Key, Sequence[Configuration]],
    budget_bytes: int | None,
    *,
    counts: Mapping[Key, int] | None = None,
    time_limit_s: float | None = TIME_LIMIT_S,
) -> Division[Key]:
    """Choose a configuration for each problem, with the least sum of count x time within the workspace budget.

    All occurrences of a problem share one segment of the workspace. Ties: less workspace, then fewer micro-batches,
    then by name, problem by problem in the order of their ``repr``. An answer with ``Status.OPTIMAL`` is the same on
    every machine. If the proof exceeds the time limit or ``MOST_SUMS``, the answer is the best so far, with its proven
    gap.

    budget_bytes: None if there is no budget.
    counts: how often each problem occurs; None if each occurs once.

    Raises ``InfeasibleError`` with the smallest feasible budget and the problems that need the most of it, and
    ``InvalidInputError`` for invalid times, workspaces, counts or limits.
    """
    start = time.perf_counter()
    check_limits(budget_bytes, time_limit_s)
    division = DivisionProblem.of(options, counts).divide(budget_bytes, time_limit_s)
    return replace(division, solve_time_s=time.perf_counter() - start)


def check_limits(budget_bytes: int | None, time_limit_s: float | None) -> None:
    """Raise ``InvalidInputError`` if the budget (bytes) or the time limit is invalid."""
    if budget_bytes is not None and not (isinstance(budget_bytes, int) and budget_bytes >= 0):
        raise InvalidInputError(
            f"the workspace budget is {budget_bytes} bytes; it must be a whole number from 0 on, or None for no limit"
        )
    if time_limit_s is not None and not time_limit_s >= 0:
        raise InvalidInputError(f"the time limit is {time_limit_s} s; it must be at least 0, or None for no limit")


def _check(options: Mapping[Key, Sequence[Configuration]], counts: Mapping[Key, int]) -> None:
    if stray := [key for key in (*options, *counts) if (key in options) != (key in counts)]:
        raise InvalidInputError(f"options and counts must have the same problems; only one of them has {_some(stray)}")
    for key, configurations in options.items():
        if not (isinstance(counts[key], int) and counts[key] >= 1):
            raise InvalidInputError(f"{key}: the count is {counts[key]}; it must be a whole number of at least 1")
        for c in configurations:
            if not 0 <= c.time_s * PICOSECONDS < math.inf:
                raise InvalidInputError(f"{key}: time_s of {c} is {c.time_s}; it must be finite and at least 0")
            if not (isinstance(c.workspace_bytes, int) and c.workspace_bytes >= 0):
                subject = f"{key}: workspace_bytes of {c} is {c.workspace_bytes}"
                raise InvalidInputError(f"{subject}; it must be a whole number of at least 0")
    if empty := [key for key, configurations in options.items() if not configurations]:
        raise InfeasibleError(
            f"no budget is enough, because there is no configuration of some problems; measure again: {_some(empty)}"
        )


def _some(items: Sequence[object]) -> str:
    ending = f"; and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return "; ".join(map(str, items[:NAMED])) + ending


# Curves

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
    curve: list[CurvePoint] = []
    for budget in sorted({*turns, *budgets}):
        check_limits(budget, None)
        time_s = problem.divide(budget, time_limit_s).objective_s
        curve.append(CurvePoint(budget, min(time_s, curve[-1].time_s) if curve else time_s))  # after a timeout
    return tuple(curve)


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
    smallest = max((min(c.workspace_bytes for c in choices) for choices in options.values()), default=0)

    def time_s(limit: int) -> float:
        seconds = 0.0
        for key, choices in options.items():
            seconds += counts[key] * min(c.time_s for c in choices if c.workspace_bytes <= limit)
        return seconds

    sizes = {smallest, *(c.workspace_bytes for choices in options.values() for c in choices)}
    turns = [(size, time_s(size)) for size in sorted(sizes) if size >= smallest]
    falling = [turn for i, turn in enumerate(turns) if i == 0 or turn[1] < turns[i - 1][1]]
    wanted = _spread(falling, points) | {limit for limit in limits if limit >= smallest}
    return tuple(CurvePoint(limit, time_s(limit)) for limit in sorted(wanted))


def _spread(turns: Sequence[tuple[int, float]], limit: int) -> set[int]:
    """Return the bytes of at most ``most`` points of a decreasing curve, at even steps along it, with both ends."""
    if limit < 2:
        raise InvalidInputError(f"points is {limit}; a curve has at least 2")
    if len(turns) <= limit:
        return {size for size, _ in turns}
    (first_bytes, first_time), (last_bytes, last_time) = turns[0], turns[-1]
    width, height = last_bytes - first_bytes, first_time - last_time
    along = [(size - first_bytes) / width + (first_time - time) / height for size, time in turns]
    wanted = [along[-1] * i / (limit - 1) for i in range(limit)]
    nearest = (min(range(len(turns)), key=lambda i: abs(along[i] - at)) for at in wanted)
    return {turns[i][0] for i in nearest}
