"""Plots of what memory buys: time against the workspace budget, and who got how much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mucudnn.bench.analyses.explanation import Explanation
from mucudnn.bench.report.budget_plot import draw_curve, draw_segments
from mucudnn.bench.report.plots import new_figure
from mucudnn.bench.report.tables import short_name
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_explanation(explanation: Explanation) -> Figure:
    """Left the curve with the chosen point, right the largest segments and what the next faster would need more."""
    budget = format_bytes(explanation.budget_bytes)
    figure = new_figure(14, 6.5, f"{explanation.tuning.source}: what a workspace budget of {budget} buys")
    curve, segments = figure.subplots(1, 2, width_ratios=(1, 1))
    draw_curve(curve, explanation.curve, (explanation.budget_bytes, explanation.time_s))
    curve.set_title(str(explanation.marginal).replace("; ", "\n"), fontsize=10, loc="left")
    rows = [
        (f"{short_name(row.row.names)} {row.row.tuned.problem.operation}", row.chosen.workspace_bytes, row.extra_bytes)
        for row in explanation.rows
    ]
    draw_segments(segments, rows)
    return figure
