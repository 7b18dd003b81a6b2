"""Plots of what memory buys: time against the workspace budget, and who got how much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mucudnn.bench.analyses.explanation import Explanation
from mucudnn.bench.report.plots import ALARM_COLOUR, OTHER_COLOUR, OURS_COLOUR, label, new_figure
from mucudnn.bench.report.tables import short_name
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 2**20
_MOST_BARS = 24


def draw_explanation(explanation: Explanation) -> Figure:
    """Left the curve with the chosen point, right the largest segments and what the next faster would need more."""
    budget = format_bytes(explanation.budget_bytes)
    figure = new_figure(14, 6.5, f"{explanation.tuning.source}: what a workspace budget of {budget} buys")
    curve, segments = figure.subplots(1, 2, width_ratios=(1, 1))
    _draw_curve(curve, explanation)
    _draw_segments(segments, explanation)
    return figure


def _draw_curve(axes: Axes, explanation: Explanation) -> None:
    points = explanation.curve.points
    sizes, times = [p.budget_bytes / _MIB for p in points], [p.time_s * 1e3 for p in points]
    axes.step(sizes, times, where="post", color=OURS_COLOUR, label="least time within the budget")
    here = explanation.budget_bytes / _MIB, explanation.time_s * 1e3
    axes.plot(
        *here, "o", color=ALARM_COLOUR, markersize=9, label=f"this budget, {format_bytes(explanation.budget_bytes)}"
    )
    axes.legend(loc="upper right", frameon=False)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    label(axes, str(explanation.marginal).replace("; ", "\n"), "workspace budget, MiB", "ms, all convolutions")


def _draw_segments(axes: Axes, explanation: Explanation) -> None:
    ranked = sorted(explanation.rows, key=lambda row: -(row.chosen.workspace_bytes + row.extra_bytes))[:_MOST_BARS]
    names = [f"{short_name(row.row.names)} {row.row.tuned.problem.operation}" for row in ranked]
    segments = [row.chosen.workspace_bytes / _MIB for row in ranked]
    extra = [row.extra_bytes / _MIB for row in ranked]
    places = range(len(ranked))  # not the names: those of a module that is called with several shapes are equal
    axes.barh(places, segments, color=OURS_COLOUR, label="its segment")
    axes.barh(places, extra, left=segments, color=OTHER_COLOUR, alpha=0.6, label="more, for the next faster")
    axes.set_yticks(places, names, fontsize=8)
    axes.invert_yaxis()
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0, borderpad=0.2)
    label(axes, f"the {len(ranked)} problems that want most\n", "workspace, MiB", "")  # above the legend
