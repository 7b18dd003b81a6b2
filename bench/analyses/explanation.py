"""Explains a workspace budget: the share of each problem, the effect of more or less memory, and time by budget."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from mucudnn.bench.report.export import CURVE, write_csv, write_each
from mucudnn.bench.report.plots import draw_curve, draw_segments, new_figure
from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import long_name, milliseconds, new_table, short_name
from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer
from mucudnn.solver.curve import BudgetCurve, Marginal, marginal, next_faster, time_curve
from mucudnn.terminal.files import beside
from mucudnn.tuning.divide import Divided
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import Configuration
from mucudnn.words.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of how a workspace budget was divided among problems. curve: time of all convolutions by budget."""

    tuning: TableTuning
    divided: Divided
    curve: BudgetCurve
    marginal: Marginal

    @property
    def rows(self) -> list[Record]:
        """The rows of the table, one for each operation of each layer, in the order of the layer table.

        Configurations have the times by which the budget was divided, those of whole runs if there are any. Times are
        those of one call, except ``saved_s``, the time that the next faster configuration saves over all occurrences of
        the layer, with ``extra_bytes`` of additional workspace; both are 0 if no configuration is faster.
        """
        assignment = self.divided.division.assignment
        return [
            _row(row, assignment[task], next_faster(options, assignment[task]))
            for row, (task, options) in zip(self.tuning.rows, self.divided.options.items(), strict=True)
        ]


def _row(row: TunedLayer, chosen: Configuration, faster: Configuration | None) -> Record:
    return {
        "layer": long_name(row.names),
        "operation": str(row.tuned.problem.operation),
        "count": row.count,
        "batch_size": row.tuned.batch_size,
        **_configuration("chosen", chosen),
        **_configuration("next_faster", faster),
        "extra_bytes": 0 if faster is None else faster.workspace_bytes - chosen.workspace_bytes,
        "saved_s": 0.0 if faster is None else row.count * (chosen.time_s - faster.time_s),
    }


def _configuration(what: str, configuration: Configuration | None) -> Record:
    return {
        what: configuration and str(configuration),
        f"{what}_s": configuration and configuration.time_s,
        f"{what}_workspace_bytes": configuration and configuration.workspace_bytes,
    }


def explain(tuning: TableTuning) -> Explanation:
    """Explain how a complete tuning used its workspace budget, and what a larger or smaller budget would change.

    Raises ``InvalidInputError`` if the tuning had no budget to divide among the problems.
    """
    divided = tuning.divided
    if divided is None:
        raise InvalidInputError("there is no workspace budget to explain; give one, such as 256MiB")
    counts = divided.division.counts
    of_budget = marginal(divided.options, counts, divided.division.budget_bytes)
    curve = time_curve(divided.options, counts, budgets=[of_budget.here.budget_bytes])
    return Explanation(tuning, divided, curve, of_budget)


def explanation_table(explanation: Explanation) -> Table:
    """Return a table of the operations: workspace, and the cost and saving of each one's next faster configuration."""
    here, rows = explanation.marginal.here, explanation.rows
    workspace = format_bytes(sum(row["chosen_workspace_bytes"] for row in rows))
    printed = new_table(
        f"{explanation.tuning.source}, workspace budget {format_bytes(here.budget_bytes)}",
        ("layer", "operation", "configuration"),
        ("count", "ms", "workspace", "next faster", "workspace more", "saves ms"),
        footer=("total", "", "", "", milliseconds(here.time_s), workspace, "", "", ""),
    )
    for row in rows:
        more = ("", "", "")
        if row["next_faster"] is not None:
            more = (row["next_faster"], format_bytes(row["extra_bytes"]), milliseconds(row["saved_s"]))
        printed.add_row(
            *(_name(row), row["operation"], row["chosen"], str(row["count"])),
            *(milliseconds(row["count"] * row["chosen_s"]), format_bytes(row["chosen_workspace_bytes"]), *more),
        )
    return printed


def _name(row: Record) -> str:
    return short_name(row["layer"].split(", "))


def in_words(explanation: Explanation) -> str:
    """Describe the effect of more or less memory, and how the budget was divided."""
    here = explanation.marginal.here
    time = f"{format_bytes(here.budget_bytes)}: {format_seconds(here.time_s)}"
    return f"{time}; {explanation.marginal}\n{explanation.divided.division}"


def explanation_record(explanation: Explanation) -> Record:
    """Return the JSON object that ``mucudnn explain --json`` writes."""
    tuning = explanation.tuning
    return {
        **record_header(tuning.config, tuning.environment),
        "source": tuning.source,
        "problems": explanation.rows,
        "marginal": explanation.marginal.to_json(),
        "curve": explanation.curve.to_json(),
        "division": explanation.divided.division.to_json(),
    }


def write_tables(explanation: Explanation, path: Path) -> None:
    """Write two CSV files: the problems to ``path``, and the points of the curve to a second file in the same folder.

    The name of the second file ends in ``-curve``: ``memory-curve.csv`` next to ``memory.csv``.
    """
    write_each(
        (path, partial(write_csv, rows=explanation.rows)),
        (beside(path, CURVE), partial(write_csv, rows=[asdict(point) for point in explanation.curve.points])),
    )


def draw_explanation(explanation: Explanation) -> Figure:
    """Draw two plots: time by budget, with the given budget marked, and the problems with the largest demand."""
    here = explanation.marginal.here
    budget = format_bytes(here.budget_bytes)
    figure = new_figure(14, 6.5, f"{explanation.tuning.source}: use of a workspace budget of {budget}")
    curve, segments = figure.subplots(1, 2, width_ratios=(1, 1))
    draw_curve(curve, explanation.curve, (here.budget_bytes, here.time_s))
    curve.set_title(str(explanation.marginal).replace("; ", "\n"), fontsize=10, loc="left")
    rows = [
        (f"{_name(row)} {row['operation']}", row["chosen_workspace_bytes"], row["extra_bytes"])
        for row in explanation.rows
    ]
    draw_segments(segments, rows)
    return figure
