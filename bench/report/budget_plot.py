"""Draws what a workspace budget buys: time against budget, and who got how much; of live results and of stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mucudnn.bench.report.plots import ALARM_COLOUR, OTHER_COLOUR, OURS_COLOUR, label
from mucudnn.solver.curve import BudgetCurve
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SEGMENTS = 24
_MIB = 2**20
_Segment = tuple[str, int, int]  # name; bytes that it got; bytes that its next faster configuration needs more


def draw_curve(axes: Axes, curve: BudgetCurve, here: tuple[int, float], colours: tuple[str, str] | None = None) -> None:
    """Draw least times within budgets. here: the budget in bytes, and its time in seconds."""
    ours, alarm = colours or (OURS_COLOUR, ALARM_COLOUR)
    sizes, times = [p.budget_bytes / _MIB for p in curve.points], [p.time_s * 1e3 for p in curve.points]
    axes.step(sizes, times, where="post", color=ours, label="least time within the budget")
    budget, time_s = here
    at = budget / _MIB, time_s * 1e3
    axes.plot(*at, "o", color=alarm, markersize=9, label=f"this budget, {format_bytes(budget)}")
    axes.legend(loc="upper right", frameon=False)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    label(axes, "", "workspace budget, MiB", "ms, all convolutions")


def draw_segments(axes: Axes, segments: Sequence[_Segment], colours: tuple[str, str] | None = None) -> None:
    """Draw the largest segments, and what more each would want."""
    ours, other = colours or (OURS_COLOUR, OTHER_COLOUR)
    ranked = sorted(segments, key=lambda segment: -(segment[1] + segment[2]))[:MOST_SEGMENTS]
    sizes, extra = [own / _MIB for _, own, _ in ranked], [more / _MIB for _, _, more in ranked]
    places = range(len(ranked))  # not the names: those of a module that is called with several shapes are equal
    axes.barh(places, sizes, color=ours, label="its segment")
    axes.barh(places, extra, left=sizes, color=other, alpha=0.6, label="more, for the next faster")
    axes.set_yticks(places, [name for name, *_ in ranked], fontsize=8)
    axes.invert_yaxis()
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, borderaxespad=0, borderpad=0.2)
    label(axes, f"the {len(ranked)} problems that want most\n", "workspace, MiB", "")  # above the legend
