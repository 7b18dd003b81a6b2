"""Workspace division (WD): one budget divided over all problems of a network (Oyama et al., μ-cuDNN, section III).

One configuration for each problem, the least sum of times, the sum of workspaces within the budget: a multiple-choice
knapsack, which ``knapsack.py`` solves in whole picoseconds and bytes. So the answer depends neither on the tolerances
of the program that found it nor on the order of the input.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from mucudnn.configuration import Configuration
from mucudnn.errors import InfeasibleError, InvalidInputError
from mucudnn.solver.costs import PICOSECONDS
from mucudnn.solver.knapsack import Row, solve, total, undominated
from mucudnn.units import format_bytes, format_seconds

Key = TypeVar("Key", bound=Hashable)

NAMED = 5  # as many problems in a message


class Status(StrEnum):
    OPTIMAL = "optimal"  # proven in whole picoseconds and bytes
    FEASIBLE = "feasible"  # within the budget; the gap bounds what a better answer could save


@dataclass(frozen=True, slots=True)
class Division(Generic[Key]):
    """The configuration of each problem, and the account of how it was found: printable.

    ``objective_s`` is the sum of count x time; no division can be below ``bound_s``. ``options`` are counted as given,
    without dominated ones, and as the bounds leave them. ``notes`` say what did not go as usual.
    """

    assignment: Mapping[Key, Configuration]
    counts: Mapping[Key, int]
    budget_bytes: int | None
    objective_s: float
    bound_s: float
    status: Status
    options: int
    undominated_options: int
    remaining_options: int
    solver: str
    solve_time_s: float
    notes: tuple[str, ...] = ()

    @property
    def workspace_bytes(self) -> int:
        """The sum of the segments of all problems."""
        return sum(configuration.workspace_bytes for configuration in self.assignment.values())

    @property
    def gap(self) -> float:
        """The largest fraction of ``objective_s`` that a better division could save."""
        return (self.objective_s - self.bound_s) / self.objective_s if self.objective_s else 0.0

    def to_json(self) -> dict[str, object]:
        """Plain values for ``json.dumps``, units in the names."""
        numbers = {name: getattr(self, name) for name in _ACCOUNT}
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
        return {**numbers, "status": str(self.status), "notes": list(self.notes), "assignment": rows}

    def __str__(self) -> str:
        found = "optimal" if self.status is Status.OPTIMAL else f"at most {self.gap:.2g} of it could be saved"
        text = (
            f"{len(self.assignment)} problems: {format_seconds(self.objective_s)} in "
            f"{format_bytes(self.workspace_bytes)} (budget {format_bytes(self.budget_bytes)}), {found}; "
            f"{self.options} options, {self.undominated_options} not dominated, {self.remaining_options} within the "
            f"bounds; {self.solver}, {format_seconds(self.solve_time_s)}"
        )
        return "\n".join((text, *self.notes))


_ACCOUNT = (
    *("budget_bytes", "workspace_bytes", "objective_s", "bound_s", "gap"),
    *("options", "undominated_options", "remaining_options", "solver", "solve_time_s"),
)


def solve_wd(
    options: Mapping[Key, Sequence[Configuration]],
    budget_bytes: int | None,
    *,
    counts: Mapping[Key, int] | None = None,
    time_limit_s: float | None = None,
) -> Division[Key]:
    """One configuration for each problem: the least sum of count x time, at most ``budget_bytes`` of workspace in sum.

    ``counts``: how often each problem occurs (None: once each); its segment is there once. ``budget_bytes`` None: no
    bound. Ties: less workspace, then fewer micro-batches, then the names, problem by problem in the order of their
    ``repr``. A division that is ``Status.OPTIMAL`` is the same on every machine; where the proof runs out of time (or
    of room: more than ``MOST_SUMS`` sums) it is the best so far, with its proven gap.

    Raises ``InfeasibleError`` with the smallest feasible budget and the problems that need the most of it, and
    ``InvalidInputError`` for times, workspaces, counts or limits that cannot be.
    """
    start = time.perf_counter()
    deadline = math.inf if time_limit_s is None else start + time_limit_s
    keys = sorted(options, key=repr)
    counts = dict.fromkeys(keys, 1) if counts is None else counts
    _check(options, budget_bytes, counts, time_limit_s)
    _require_feasible(options, budget_bytes)
    named = [sorted(options[key], key=lambda c: (str(c), c.micro_configs)) for key in keys]
    choices = [undominated(_rows(named[i], counts[key])) for i, key in enumerate(keys)]
    budget = sum(rows[-1][0] for rows in choices) if budget_bytes is None else budget_bytes
    found = solve(choices, budget, deadline)
    chosen = [named[i][row[3]] for i, row in enumerate(found.rows)]
    return Division(
        assignment=dict(zip(keys, chosen, strict=True)),
        counts={key: counts[key] for key in keys},
        budget_bytes=budget_bytes,
        objective_s=total(found.rows)[1] / PICOSECONDS,
        bound_s=found.bound_ps / PICOSECONDS,
        status=Status.OPTIMAL if found.proven else Status.FEASIBLE,
        options=sum(map(len, named)),
        undominated_options=sum(map(len, choices)),
        remaining_options=found.remaining_options,
        solver=found.solver,
        solve_time_s=time.perf_counter() - start,
        notes=found.notes,
    )


def _check(
    options: Mapping[Key, Sequence[Configuration]],
    budget_bytes: int | None,
    counts: Mapping[Key, int],
    time_limit_s: float | None,
) -> None:
    if budget_bytes is not None and budget_bytes < 0:
        raise InvalidInputError(f"the workspace budget is {budget_bytes} bytes; it must be at least 0, or None")
    if time_limit_s is not None and not time_limit_s >= 0:
        raise InvalidInputError(f"the time limit is {time_limit_s} s; it must be at least 0, or None: no limit")
    if stray := [key for key in (*options, *counts) if (key in options) != (key in counts)]:
        raise InvalidInputError(f"options and counts must have the same problems; only one has {_some(stray)}")
    for key, configurations in options.items():
        if not (isinstance(counts[key], int) and counts[key] >= 1):
            raise InvalidInputError(f"{key}: the count is {counts[key]}; it must be a whole number of at least 1")
        for configuration in configurations:
            _check_configuration(key, configuration)


def _check_configuration(key: Hashable, configuration: Configuration) -> None:
    time_s, workspace = configuration.time_s, configuration.workspace_bytes
    if not 0 <= time_s * PICOSECONDS < math.inf:
        raise InvalidInputError(f"{key}: time_s of {configuration} is {time_s}; it must be finite and at least 0")
    if not (isinstance(workspace, int) and workspace >= 0):
        what = f"{key}: workspace_bytes of {configuration} is {workspace}"
        raise InvalidInputError(f"{what}; it must be a whole number of at least 0")


def _require_feasible(options: Mapping[Key, Sequence[Configuration]], budget_bytes: int | None) -> None:
    if empty := [key for key, configurations in options.items() if not configurations]:
        raise InfeasibleError(f"no configuration at all, so no budget is enough; measure again: {_some(empty)}")
    least = {key: min(c.workspace_bytes for c in configurations) for key, configurations in options.items()}
    smallest = sum(least.values())
    if budget_bytes is not None and budget_bytes < smallest:
        largest = sorted(least, key=lambda key: (-least[key], repr(key)))
        needs = [f"{key} (at least {least[key]}B)" for key in largest if least[key]]
        raise InfeasibleError(
            f"the workspace budget of {budget_bytes}B is too small for {len(options)} problems: the smallest feasible "
            f"budget is {smallest}B ({format_bytes(smallest)}); allow at least that much. Most is needed by "
            f"{_some(needs)}",
            smallest_feasible_bytes=smallest,
        )


def _some(items: Sequence[object]) -> str:
    more = f"; and {len(items) - NAMED} more" if len(items) > NAMED else ""
    return "; ".join(map(str, items[:NAMED])) + more


def _rows(configurations: Sequence[Configuration], count: int) -> list[Row]:
    """Configurations in the order of their names as rows of whole numbers."""
    return [
        (c.workspace_bytes, count * round(c.time_s * PICOSECONDS), len(c.micro_configs), rank)
        for rank, c in enumerate(configurations)
    ]
