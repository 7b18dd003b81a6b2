"""The multiple-choice knapsack in whole numbers: one row of each choice, the least time, within a budget of bytes.

Rows that cannot be in the best answer are removed by exact bounds, PuLP solves what is left of the integer linear
program, and a search proves its answer, or betters it, and settles ties.
"""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

# An option, or the sum of one option of each of some problems: workspace in bytes, time in ps, number of micro-batches,
# and a number for the name that orders as names do. Rows compare as ties are settled, and sums of rows do too.
Row: TypeAlias = tuple[int, int, int, int]

MOST_SUMS = 200_000  # the search gives up beyond: some hundred MB, some seconds
FEW_SUMS = 5_000  # what the search is tried with alone: as fast as starting a program
PROGRAM_GAP = 1e-7  # where programs stop: the search goes on, and programs cannot tell less apart anyway


def undominated(rows: Iterable[Row]) -> list[Row]:
    """Least workspace first, fastest last: each is faster than all with as much workspace or less; ties as ``Row``."""
    kept: list[Row] = []
    least_ps: float = math.inf
    for row in sorted(rows):
        if row[1] < least_ps:
            kept.append(row)
            least_ps = row[1]
    return kept


def total(rows: Sequence[Row]) -> tuple[int, int]:
    """Bytes and picoseconds."""
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


@dataclass(frozen=True, slots=True)
class KnapsackAnswer:
    """The chosen rows, in the order of the problems; ``proven``: best of all, ties settled."""

    rows: list[Row]
    bound_ps: int
    proven: bool
    remaining_options: int
    solver: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Price:
    """The worth of a byte: ``ps`` picoseconds for ``bytes`` bytes, in whole numbers.

    Any price gives a bound (Lagrange): no division is faster than the sum of the least costs, less the priced budget.
    """

    ps: int
    bytes: int

    def cost(self, row: Row) -> int:
        """Time and priced workspace, in 1/bytes of a picosecond."""
        return self.bytes * row[1] + self.ps * row[0]


def solve(choices: list[list[Row]], budget: int, deadline: float) -> KnapsackAnswer:
    """Bounds first, then a program on what they leave, then the search that proves what the program found."""
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
        why = "the time limit came" if time.perf_counter() > deadline else f"more than {MOST_SUMS} sums differ"
        notes.append(f"the search for a proof was stopped: {why}; the answer is the best so far")
    return KnapsackAnswer(proven or chosen, bound_ps, proven is not None, remaining, solver, tuple(notes))


def breakpoints(choices: list[list[Row]]) -> list[tuple[int, int]]:
    """Bytes and picoseconds where the linear relaxation turns: from the least workspace to the least time.

    At these budgets it chooses whole rows, so its answer is that of the integer program too; between two of them the
    least time is not below the straight line.
    """
    size_bytes, time_ps = total([rows[0] for rows in choices])
    points = [(size_bytes, time_ps)]
    for _, slower, faster in _steps(choices):
        size_bytes += faster[0] - slower[0]
        time_ps += faster[1] - slower[1]
        points.append((size_bytes, time_ps))
    return points


def _greedy(choices: list[list[Row]], budget: int) -> tuple[list[Row], _Price]:
    """The linear relaxation, rounded down: the steps that save most per byte first, as long as they fit.

    The price is that of the first step that does not fit (Sinha and Zoltners, 1979); 0 if all fit.
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
    """Return steps between rows of a hull, with the number of the problem: those that save most per byte first."""
    steps = [(i, slower, faster) for i, rows in enumerate(choices) for slower, faster in pairwise(_hull(rows))]
    return sorted(steps, key=lambda step: -_saved_per_byte(step[1], step[2]))


def _saved_per_byte(slower: Row, faster: Row) -> float:
    """Picoseconds; neighbours of an undominated set differ in both."""
    return (slower[1] - faster[1]) / (faster[0] - slower[0])


def _hull(rows: list[Row]) -> list[Row]:
    """The lower convex hull of undominated rows: each step saves less per byte than the one before."""
    hull: list[Row] = []
    for row in rows:
        while len(hull) > 1 and _saved_per_byte(hull[-1], row) >= _saved_per_byte(hull[-2], hull[-1]):
            hull.pop()
        hull.append(row)
    return hull


def _within_bounds(choices: list[list[Row]], budget: int, price: _Price, chosen: list[Row]) -> list[list[Row]]:
    """The options with which a division as fast as ``chosen`` is not ruled out, on the hull or off it."""
    least = [min(map(price.cost, rows)) for rows in choices]
    slack = price.bytes * total(chosen)[1] + price.ps * budget - sum(least)
    return [[row for row in rows if price.cost(row) - least[i] <= slack] for i, rows in enumerate(choices)]


def programs() -> list[str]:
    """Name the programs that are there, the one to ask first before the others.

    CBC comes with PuLP. HiGHS takes up to twice as long for easy programs (some 0.1 s), and a fraction of the time for
    hard ones.
    """
    return ["HiGHS", "CBC"] if importlib.util.find_spec("highspy") else ["CBC"]


def _by_program(core: list[list[Row]], budget: int, deadline: float, notes: list[str]) -> tuple[str, list[Row] | None]:
    """The answer of the first program that gives one that holds in whole numbers, and its name."""
    for name in programs():
        left_s = (deadline - time.perf_counter()) / 2  # the other half is for the proof
        if left_s <= 0:
            notes.append(f"{name} was not asked: the time limit came")
            break
        try:
            answer, in_time = _run_program(name, core, budget, left_s)
        except Exception as error:  # whatever goes wrong in a program that is not ours, the search can do without
            reason = " ".join(str(error).split())
            notes.append(f"{name} failed ({type(error).__name__}: {reason}); solved without it")
            continue
        if not in_time:
            notes.append(f"{name} was stopped by the time limit")
        if answer is not None:
            return f"{name}, checked by exact search", answer
        notes.append(f"{name} gave no division within the budget; solved without it")
    return "exact search", None


def _run_program(name: str, core: list[list[Row]], budget: int, limit_s: float) -> tuple[list[Row] | None, bool]:
    """The integer linear program through PuLP: what it chose, if that is a division, and whether it ended by itself."""
    import pulp  # here: it takes 0.1 s, and most who import the solvers do not divide

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 3 on what PuLP 4 will call otherwise
        program = pulp.LpProblem("division", pulp.LpMinimize)
        picks = [[pulp.LpVariable(f"x_{i}_{j}", cat="Binary") for j in range(len(rows))] for i, rows in enumerate(core)]
        pairs = [pair for rows, pick in zip(core, picks, strict=True) for pair in zip(rows, pick, strict=True)]
        program += pulp.LpAffineExpression((x, row[1]) for row, x in pairs)
        program += pulp.LpAffineExpression((x, row[0]) for row, x in pairs) <= budget
        for pick in picks:
            program += pulp.lpSum(pick) == 1
        settings: dict[str, Any] = {"msg": False, "threads": 1, "gapRel": PROGRAM_GAP}
        settings["timeLimit"] = None if math.isinf(limit_s) else limit_s
        program.solve(pulp.HiGHS(**settings) if name == "HiGHS" else pulp.PULP_CBC_CMD(**settings))
    chosen = [
        [row for row, x in zip(rows, pick, strict=True) if (x.varValue or 0) > 0.5]
        for rows, pick in zip(core, picks, strict=True)
    ]
    answer = [row for rows in chosen for row in rows]
    is_division = all(len(rows) == 1 for rows in chosen) and total(answer)[0] <= budget
    return answer if is_division else None, program.sol_status != pulp.LpSolutionIntegerFeasible


def _search(
    core: list[list[Row]], budget: int, price: _Price, incumbent_ps: int, deadline: float, most_sums: int
) -> tuple[list[Row] | None, int]:
    """The best division of all, and a bound in picoseconds; no division if time or room for the proof runs out.

    Dynamic programming over the undominated sums of some problems (Nemhauser and Ullmann, 1969), without those that
    nothing as fast as the incumbent can follow. First come the problems where any option but the cheapest costs most
    more, so that the sums are few for long.
    """
    base = 1 + max((row[3] for rows in core for row in rows), default=0)
    digits = [base**place for place in reversed(range(len(core)))]  # of the name: the first problem's counts most
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
    """Each sum with each row, within what is left for them. The inner loop of the search: nothing is called here."""
    for b, t, m, name in sums:
        for row_b, row_t, row_m, row_name in rows:
            new_b, new_t = b + row_b, t + row_t
            if new_b <= most_bytes and price.bytes * new_t + price.ps * new_b <= most_cost:
                yield new_b, new_t, m + row_m, name + row_name


def _regret(rows: list[Row], price: _Price) -> float:
    """Return what the second cheapest option costs more than the cheapest."""
    costs = sorted(map(price.cost, rows))
    return costs[1] - costs[0] if len(costs) > 1 else math.inf


def _sums_from(numbers: list[int]) -> list[int]:
    """The sum of ``numbers[i:]`` for each i, and 0 at the end."""
    return [*accumulate(reversed(numbers), initial=0)][::-1]
