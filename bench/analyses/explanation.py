"""Explains what memory buys: each problem's share of a budget, what the next byte brings, and the whole curve."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer
from mucudnn.solver.curve import BudgetCurve, Marginal, marginal, next_faster, time_curve
from mucudnn.tuning.choose import Divided
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import Configuration


@dataclass(frozen=True, slots=True)
class ExplainedLayer:
    """One operation of one layer: its share of the budget, and the next faster configuration, if there is one.

    ``chosen`` and ``next_faster`` have the times that the budget was divided with: those of whole runs where there were
    any, with what a call of ours costs beside its arithmetic.
    """

    row: TunedLayer
    chosen: Configuration
    next_faster: Configuration | None

    @property
    def extra_bytes(self) -> int:
        """Workspace that the next faster configuration needs more; 0 where there is none."""
        return 0 if self.next_faster is None else self.next_faster.workspace_bytes - self.chosen.workspace_bytes

    @property
    def saved_s(self) -> float:
        """Time that the next faster configuration saves, all occurrences together; 0 where there is none."""
        return 0.0 if self.next_faster is None else self.row.count * (self.chosen.time_s - self.next_faster.time_s)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A tuning with a divided budget, explained. ``curve``: time of all convolutions against the budget."""

    tuning: TableTuning
    rows: tuple[ExplainedLayer, ...]
    curve: BudgetCurve
    marginal: Marginal

    @property
    def budget_bytes(self) -> int:
        return self.marginal.here.budget_bytes

    @property
    def time_s(self) -> float:
        """Time of all convolutions with this budget."""
        return self.marginal.here.time_s


def explain(tuning: TableTuning) -> Explanation:
    """Explain what the budget of a complete tuning bought, and what more or less of it would change.

    Raises ``InvalidInputError`` where no budget was divided.
    """
    divided = tuning.divided
    if divided is None:
        raise InvalidInputError("there is no workspace budget to explain; give one, such as 256MiB")
    budget = divided.division.budget_bytes
    counts = divided.division.counts
    of_budget = marginal(divided.options, counts, budget)
    curve = time_curve(divided.options, counts, budgets=[of_budget.here.budget_bytes])
    return Explanation(tuning, _rows(tuning, divided), curve, of_budget)


def _rows(tuning: TableTuning, divided: Divided) -> tuple[ExplainedLayer, ...]:
    """Explain each row; the tasks of a division are in the order of the rows."""
    rows = []
    for row, (task, options) in zip(tuning.rows, divided.options.items(), strict=True):
        chosen = divided.division.assignment[task]
        rows.append(ExplainedLayer(row, chosen, next_faster(options, chosen)))
    return tuple(rows)
