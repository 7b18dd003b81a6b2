"""A network's least time as a function of its workspace budget, and the effect of a larger or smaller budget."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from mucudnn.solver.division import TIME_LIMIT_S, DivisionProblem, check_limits
from mucudnn.solver.knapsack import breakpoints
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import Configuration
from mucudnn.words.units import format_bytes

Key = TypeVar("Key", bound=Hashable)

POINTS = 50
LEAST_SHOWN = 0.0005  # Changes of the time below this fraction are not shown.


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """A network's least time within a workspace budget, and the workspace that it uses.

    ``bound_s`` is a proven lower bound of the least time.
    """

    budget_bytes: int
    workspace_bytes: int
    time_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class BudgetCurve:
    """A network's least time for each workspace budget, smallest budget first; a larger budget is never slower.

    The first point is the smallest feasible budget. Beyond ``enough_bytes``, more memory saves no time. Between two
    points, the least time is at most that of the smaller budget.
    """

    points: tuple[BudgetPoint, ...]
    smallest_feasible_bytes: int
    enough_bytes: int

    def to_json(self) -> dict[str, object]:
        """Return the points of the curve as plain values for ``json.dumps``, with units in the names."""
        return asdict(self)


def time_curve(
    options: Mapping[Key, Sequence[Configuration]],
    counts: Mapping[Key, int] | None = None,
    *,
    points: int = POINTS,
    budgets: Iterable[int] = (),
    constant_s: float = 0.0,
    time_limit_s: float | None = TIME_LIMIT_S,
) -> BudgetCurve:
    """Return a network's least time at budgets from the smallest feasible one up to the largest that saves time.

    The times are those of ``solve_wd``. The curve has at most ``points`` budgets (at least 2), and ``budgets`` in
    addition. The budgets are breakpoints of the linear relaxation, at which the bounds alone prove the answer; if there
    are more breakpoints than ``points``, they are sampled at even steps of time and bytes. ``constant_s``, a time that
    does not depend on the budget, is added to every time. ``time_limit_s`` applies to each point.

    Raises the errors of ``solve_wd``.
    """
    if points < 2:
        raise InvalidInputError(f"points is {points}; a curve has at least 2")
    network = _Network(options, counts, constant_s, time_limit_s)
    turns = _spread(breakpoints(network.choices.rows), points)
    found: list[BudgetPoint] = []
    for budget in sorted({*turns, *budgets}):
        point = network.at(budget)
        if found and point.time_s > found[-1].time_s:  # After a timeout, the last division still fits.
            last = found[-1]
            point = BudgetPoint(budget, last.workspace_bytes, last.time_s, min(point.bound_s, last.time_s))
        found.append(point)
    return BudgetCurve(tuple(found), network.choices.smallest_bytes, network.choices.enough_bytes)


@dataclass(frozen=True, slots=True)
class Marginal:
    """The effects of a larger and of a smaller workspace budget than ``here``; ``str`` describes them in words.

    ``more`` is None if no larger budget saves time, ``less`` is None if no smaller budget is feasible.
    """

    here: BudgetPoint
    more: BudgetPoint | None
    less: BudgetPoint | None
    smallest_feasible_bytes: int
    enough_bytes: int

    def to_json(self) -> dict[str, object]:
        """Return plain values for ``json.dumps``, with units in the names; ``words`` is the text of ``str``."""
        return {**asdict(self), "words": str(self)}

    def __str__(self) -> str:
        return f"{self._gain()}; {self._loss()}"

    def _gain(self) -> str:
        enough = f"everything is at its fastest from {format_bytes(self.enough_bytes)} on"
        if self.more is None:
            gain = "nothing" if self.here.budget_bytes >= self.enough_bytes else f"less than {100 * LEAST_SHOWN:g} %"
            return f"more memory buys {gain}: {enough}"
        words = f"{format_bytes(self.more.budget_bytes - self.here.budget_bytes)} more: {self._change(self.more)}"
        return f"{words} ({enough})" if self.more.budget_bytes >= self.enough_bytes else words

    def _loss(self) -> str:
        smallest = format_bytes(self.smallest_feasible_bytes)
        if self.less is None:
            return f"less is not feasible: {smallest} is the smallest budget"
        words = f"{format_bytes(self.here.budget_bytes - self.less.budget_bytes)} less: {self._change(self.less)}"
        if self.less.budget_bytes == self.smallest_feasible_bytes:
            return f"{words} ({smallest} is the smallest feasible budget)"
        return words

    def _change(self, other: BudgetPoint) -> str:
        """Describe, in percent, how much slower or faster the other budget is than ``here``."""
        change = (other.time_s - self.here.time_s) / self.here.time_s if self.here.time_s else 0.0
        if abs(change) < LEAST_SHOWN:
            return "no slower"
        percent = 100 * abs(change)
        rounded = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
        return f"{rounded} % {'slower' if change > 0 else 'faster'}"


def marginal(
    options: Mapping[Key, Sequence[Configuration]],
    counts: Mapping[Key, int] | None,
    budget_bytes: int | None,
    *,
    constant_s: float = 0.0,
) -> Marginal:
    """Return the effects of about a quarter more and a quarter less workspace than ``budget_bytes``.

    budget_bytes: None for the smallest budget with the least time. The step is a power of two in bytes; upwards it is
    doubled until the time changes, downwards it ends at the smallest feasible budget. constant_s: time that does not
    depend on the budget, added to every time.

    Raises the errors of ``solve_wd``.
    """
    network = _Network(options, counts, constant_s, TIME_LIMIT_S)
    smallest, enough = network.choices.smallest_bytes, network.choices.enough_bytes
    here = network.at(enough if budget_bytes is None else budget_bytes)
    step = 2 ** round(math.log2(max(here.budget_bytes / 4, 1)))
    return Marginal(
        here=here,
        more=network.faster(here, step),
        less=network.at(max(here.budget_bytes - step, smallest)) if here.budget_bytes > smallest else None,
        smallest_feasible_bytes=smallest,
        enough_bytes=enough,
    )


def next_faster(options: Iterable[Configuration], chosen: Configuration) -> Configuration | None:
    """Return the configuration faster than ``chosen`` that needs the least additional workspace, or None.

    If several need the same additional workspace, the fastest of them is returned.
    """
    faster = [c for c in options if c.time_s < chosen.time_s]
    chosen_bytes = chosen.workspace_bytes
    ties = sorted(faster, key=lambda c: (c.time_s, c.workspace_bytes, len(c.micro_configs), str(c)))
    return min(ties, key=lambda c: max(c.workspace_bytes - chosen_bytes, 0), default=None)


class _Network:
    """The configurations of a network's problems, from which the best division is found for any budget."""

    def __init__(
        self,
        options: Mapping[Key, Sequence[Configuration]],
        counts: Mapping[Key, int] | None,
        constant_s: float,
        time_limit_s: float | None,
    ) -> None:
        check_limits(None, time_limit_s)
        if not 0 <= constant_s < math.inf:
            raise InvalidInputError(f"constant_s is {constant_s}; it must be finite and at least 0")
        self.choices = DivisionProblem.of(options, counts)
        self._constant_s, self._time_limit_s = constant_s, time_limit_s

    def at(self, budget_bytes: int) -> BudgetPoint:
        check_limits(budget_bytes, None)
        division = self.choices.divide(budget_bytes, self._time_limit_s)
        time_s, bound_s = division.objective_s + self._constant_s, division.bound_s + self._constant_s
        return BudgetPoint(budget_bytes, division.workspace_bytes, time_s, bound_s)

    def faster(self, here: BudgetPoint, step: int) -> BudgetPoint | None:
        """Try ``step`` bytes more than ``here``, then twice, four times ... as many; return the first faster point.

        Returns None if no larger budget is faster.
        """
        budget = here.budget_bytes
        while budget < self.choices.enough_bytes:
            budget = here.budget_bytes + step
            more = self.at(budget)
            if more.time_s < here.time_s * (1 - LEAST_SHOWN):
                return more
            step *= 2
        return None


def _spread(turns: list[tuple[int, int]], most: int) -> set[int]:
    """Return the bytes of at most ``most`` points of a decreasing curve, at even steps along it, with both ends."""
    if len(turns) <= most:
        return {size for size, _ in turns}
    (first_bytes, first_ps), (last_bytes, last_ps) = turns[0], turns[-1]
    width, height = last_bytes - first_bytes, first_ps - last_ps
    along = [(size - first_bytes) / width + (first_ps - time_ps) / height for size, time_ps in turns]
    wanted = [along[-1] * i / (most - 1) for i in range(most)]
    nearest = (min(range(len(turns)), key=lambda i: abs(along[i] - at)) for at in wanted)
    return {turns[i][0] for i in nearest}
