"""An exact solver of the multiple-choice knapsack problem: choose one row per problem, within a budget, in least time.

A row is a configuration as whole numbers: bytes, picoseconds, and numbers that break ties. Exact bounds remove rows
that cannot be in the best answer, PuLP solves the remaining integer linear program, and a search proves or improves its
answer and breaks ties. All arithmetic of bounds and search is in whole numbers.
"""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import pulp


# An option, or a sum of options of several problems: workspace in bytes, time in ps, number of micro-batches, and a
# number that is ordered like the names. Comparing rows, or sums of rows, breaks ties.
Row: TypeAlias = tuple[int, int, int, int]

MOST_SUMS = 200_000  # The search gives up beyond this, at a few hundred MB and a few seconds.
FEW_SUMS = 5_000  # Up to this many, the search takes no longer than starting an external solver.
PROGRAM_GAP = 1e-7  # External solvers stop at this gap, near their precision; the search closes the rest.


def undominated(rows: Iterable[Row]) -> list[Row]:
    """Return the rows not dominated in workspace and time, from the least workspace to the fastest.

    Rows of equal workspace and time are compared by the remaining fields of ``Row``; the first is kept.
    """
    kept: list[Row] = []
    least_ps: float = math.inf
    for row in sorted(rows):
        if row[1] < least_ps:
            kept.append(row)
            least_ps = row[1]
    return kept


def total(rows: Sequence[Row]) -> tuple[int, int]:
    """Return the sums of the rows' bytes and of their picoseconds."""
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


@dataclass(frozen=True, slots=True)
class KnapsackAnswer:
    """The rows chosen by the solver, one for each problem. If ``proven``, they are optimal, with ties broken."""

    rows: list[Row]
    bound_ps: int
    proven: bool
    remaining_options: int
    solver: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Price:
    """A price of workspace (Lagrange multiplier of the budget): ``ps`` picoseconds for ``bytes`` bytes.

    Any price gives a lower bound on the time: the sum of each problem's least cost (time plus price of the workspace),
    minus the price of the whole budget.
    """

    ps: int
    bytes: int

    def cost(self, row: Row) -> int:
        """Return the row's time plus the price of its workspace, a whole number in units of 1/bytes picoseconds."""
        return self.bytes * row[1] + self.ps * row[0]


def solve(choices: list[list[Row]], budget: int, deadline: float) -> KnapsackAnswer:
    """Choose one row for each problem: by bounds, then by an external solver, then by a search that proves the answer.

    The external solver and the search work on the rows that the bounds leave.
    """
    chosen, price = _greedy(choices, budget)
    core = _within_bounds(choices, budget, price, chosen)
    remaining, notes = sum(map(len, core)), list[str]()
    solver = "exact search" if remaining > len(core) else "bounds alone"
    proven, bound_ps = _search(core, budget, price, total(chosen)[1], deadline, FEW_SUMS)
    if proven is None:
        solver, answer = _by_program(core, budget, deadline, notes)
        if answer is not None and total(answer)[1] < total(chosen)[1]:
            chosen = answer
            core = _within_bounds(choices, budget, price, chosen)
        proven, bound_ps = _search(core, budget, price, total(chosen)[1], deadline, MOST_SUMS)
    if proven is None:
        why = "time limit reached" if time.perf_counter() > deadline else f"more than {MOST_SUMS} partial sums"
        notes.append(f"the search for a proof was stopped ({why}); the answer is the best so far")
    return KnapsackAnswer(proven or chosen, bound_ps, proven is not None, remaining, solver, tuple(notes))


def breakpoints(choices: list[list[Row]]) -> list[tuple[int, int]]:
    """Return the breakpoints of the knapsack's linear relaxation as (bytes, picoseconds), least workspace first.

    At these budgets the solution of the relaxation has one row for each problem, so it also solves the integer program.
    Between two breakpoints the straight line is a lower bound of the least time.
    """
    size_bytes, time_ps = total([rows[0] for rows in choices])
    points = [(size_bytes, time_ps)]
    for _, slower, faster in _steps(choices):
        size_bytes += faster[0] - slower[0]
        time_ps += faster[1] - slower[1]
        points.append((size_bytes, time_ps))
    return points


def _greedy(choices: list[list[Row]], budget: int) -> tuple[list[Row], _Price]:
    """Round the linear relaxation down: take the steps to faster rows that save most per byte, while they fit.

    Return the chosen rows, and the price per byte of the first step that does not fit (Sinha and Zoltners, 1979); 0 if
    all steps fit.
    """
    chosen = [rows[0] for rows in choices]
    room = budget - total(chosen)[0]
    price: _Price | None = None
    for i, slower, faster in _steps(choices):
        more_bytes = faster[0] - slower[0]
        if chosen[i] is slower and more_bytes <= room:
            chosen[i] = faster
            room -= more_bytes
        elif price is None:
            price = _Price(slower[1] - faster[1], more_bytes)
    return chosen, price or _Price(0, 1)


def _steps(choices: list[list[Row]]) -> list[tuple[int, Row, Row]]:
    """Return the steps from each row of a convex hull to the next faster one, in descending order of saving per byte.

    A step is (number of the problem, slower row, faster row).
    """
    steps = [(i, slower, faster) for i, rows in enumerate(choices) for slower, faster in pairwise(_hull(rows))]
    return sorted(steps, key=lambda step: -_saved_per_byte(step[1], step[2]))


def _saved_per_byte(slower: Row, faster: Row) -> float:
    """Return the picoseconds that the faster row saves per additional byte. The rows must differ in bytes."""
    return (slower[1] - faster[1]) / (faster[0] - slower[0])


def _hull(rows: list[Row]) -> list[Row]:
    """Return the lower convex hull of undominated rows: each step to the next row saves less per byte than the last."""
    hull: list[Row] = []
    for row in rows:
        while len(hull) > 1 and _saved_per_byte(hull[-1], row) >= _saved_per_byte(hull[-2], hull[-1]):
            hull.pop()
        hull.append(row)
    return hull


def _within_bounds(choices: list[list[Row]], budget: int, price: _Price, chosen: list[Row]) -> list[list[Row]]:
    """Return, for each problem, the rows that a solution as fast as ``chosen`` may contain, using a lower bound."""
    least = [min(map(price.cost, rows)) for rows in choices]
    slack = price.bytes * total(chosen)[1] + price.ps * budget - sum(least)
    return [[row for row in rows if price.cost(row) - least[i] <= slack] for i, rows in enumerate(choices)]


def _by_program(core: list[list[Row]], budget: int, deadline: float, notes: list[str]) -> tuple[str, list[Row] | None]:
    """Run the external solvers until one finds a feasible answer; return the solver's description and the answer.

    Feasibility is checked in whole numbers. The answer is None if all solvers fail.
    """
    for name in programs():
        left_s = (deadline - time.perf_counter()) / 2  # The other half is left for the proof.
        if left_s <= 0:
            notes.append(f"{name} was not started: time limit reached")
            break
        try:
            with pulp_without_warnings() as pulp:
                names = [[f"x_{i}_{j}" for j in range(len(rows))] for i, rows in enumerate(core)]
                program, picks = integer_program(core, budget, names)
                run_program(program, name, left_s, gapRel=PROGRAM_GAP)
        except Exception as error:  # The search does not need the external solver.
            reason = " ".join(str(error).split())
            notes.append(f"{name} failed ({type(error).__name__}: {reason}); solved without it")
            continue
        if program.sol_status == pulp.LpSolutionIntegerFeasible:
            notes.append(f"{name} was stopped by the time limit")
        chosen = [
            [row for row, x in zip(rows, pick, strict=True) if (x.varValue or 0) > 0.5]
            for rows, pick in zip(core, picks, strict=True)
        ]
        answer = [row for rows in chosen for row in rows]
        if all(len(rows) == 1 for rows in chosen) and total(answer)[0] <= budget:
            return f"{name}, checked by exact search", answer
        notes.append(f"{name} gave no division within the budget; solved without it")
    return "exact search", None


def _search(
    core: list[list[Row]], budget: int, price: _Price, incumbent_ps: int, deadline: float, most_sums: int
) -> tuple[list[Row] | None, int]:
    """Return the best rows and a lower bound in picoseconds; the rows are None after ``deadline`` or ``most_sums``.

    Dynamic programming over the undominated partial sums (Nemhauser and Ullmann, 1969), without sums that cannot be
    completed in the time of the best answer so far. Problems whose second cheapest row costs much more than the
    cheapest come first, which keeps the number of sums small.
    """
    base = 1 + max((row[3] for rows in core for row in rows), default=0)
    digits = [base**place for place in reversed(range(len(core)))]  # place value of each problem's name number
    order = sorted(range(len(core)), key=lambda i: (-_regret(core[i], price), i))
    ordered = [[(b, t, m, name * digits[i]) for b, t, m, name in core[i]] for i in order]
    least_cost = _sums_from([min(map(price.cost, rows)) for rows in ordered])
    least_bytes = _sums_from([rows[0][0] for rows in ordered])
    sums: list[Row] = [(0, 0, 0, 0)]
    for i, rows in enumerate(ordered):
        if len(sums) > most_sums or time.perf_counter() > deadline:
            least = min(map(price.cost, sums)) + least_cost[i] - price.ps * budget
            return None, -(-least // price.bytes)
        most_cost = price.bytes * incumbent_ps + price.ps * budget - least_cost[i + 1]
        sums = undominated(_extended(sums, rows, budget - least_bytes[i + 1], most_cost, price))
    best = sums[-1]
    names = [best[3] // digit % base for digit in digits]
    return [next(row for row in rows if row[3] == name) for rows, name in zip(core, names, strict=True)], best[1]


def _extended(sums: list[Row], rows: list[Row], most_bytes: int, most_cost: int, price: _Price) -> Iterator[Row]:
    """Yield each partial sum extended by each row, if it is within both limits.

    The arithmetic is inlined because this is the inner loop.
    """
    for b, t, m, name in sums:
        for row_b, row_t, row_m, row_name in rows:
            new_b, new_t = b + row_b, t + row_t
            if new_b <= most_bytes and price.bytes * new_t + price.ps * new_b <= most_cost:
                yield new_b, new_t, m + row_m, name + row_name


def _regret(rows: list[Row], price: _Price) -> float:
    """Return the difference in cost between a problem's cheapest row and its second cheapest."""
    costs = sorted(map(price.cost, rows))
    return costs[1] - costs[0] if len(costs) > 1 else math.inf


def _sums_from(numbers: list[int]) -> list[int]:
    """Return the suffix sums: ``numbers[i:]`` summed for each i, and 0 at the end."""
    return [*accumulate(reversed(numbers), initial=0)][::-1]


# External solvers of integer programs


def programs() -> list[str]:
    """Return the names of the installed external solvers of integer programs, in the order in which to try them.

    CBC comes with PuLP. HiGHS takes up to twice as long for easy problems (about 0.1 s), and far less for hard ones.
    """
    return ["HiGHS", "CBC"] if importlib.util.find_spec("highspy") else ["CBC"]


@contextmanager
def pulp_without_warnings() -> Iterator[Any]:
    """Give the module ``pulp``, imported here because that takes 0.1 s and few need it."""
    import pulp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 warns about names that PuLP 4 changes.
        yield pulp


def run_program(program: pulp.LpProblem, name: str, limit_s: float, **settings: Any) -> None:
    """Solve a program by the named solver. Raises what PuLP or the solver raises.

    limit_s: seconds, or infinity.
    """
    with pulp_without_warnings() as pulp:
        settings |= {"msg": False, "threads": 1, "timeLimit": None if math.isinf(limit_s) else limit_s}
        program.solve(pulp.HiGHS(**settings) if name == "HiGHS" else pulp.PULP_CBC_CMD(**settings))


def integer_program(
    choices: list[list[Row]], budget: int | None, names: Sequence[Sequence[str]]
) -> tuple[pulp.LpProblem, list[list[pulp.LpVariable]]]:
    """Return the integer linear program of a division, and a variable for each row, which is 1 if the row is chosen.

    The objective is in picoseconds.

    budget: bytes; None if there is no limit.
    names: of the variables.
    """
    import pulp  # Imported here because it takes 0.1 s, and only workspace division needs it.

    program = pulp.LpProblem("division", pulp.LpMinimize)
    picks = [[pulp.LpVariable(name, cat="Binary") for name in problem_names] for problem_names in names]
    pairs = [pair for rows, pick in zip(choices, picks, strict=True) for pair in zip(rows, pick, strict=True)]
    program += pulp.LpAffineExpression((x, row[1]) for row, x in pairs), "time_ps"
    if budget is not None:
        program += pulp.LpAffineExpression((x, row[0]) for row, x in pairs) <= budget, "budget"
    for number, pick in enumerate(picks):
        program += pulp.lpSum(pick) == 1, f"one_{number}"
    return program, picks
