"""Draws time and workspace against batch size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from mucudnn.bench.analyses.batch_report import name_of
from mucudnn.bench.analyses.batch_sizes import BatchSweep, Curves
from mucudnn.bench.analyses.cliffs import Cliff, CliffKind, Curve, Point
from mucudnn.bench.report.tables import memory_bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
from mucudnn.bench.report.plots import (
    ALARM_COLOUR,
    OTHER_COLOUR,
    OURS_COLOUR,
    TORCH_COLOUR,
    batch_axis,
    label,
    new_figure,
    ratio_axis,
)

_STYLES: Mapping[Curve, Mapping[str, Any]] = {
    Curve.TORCH: {"color": TORCH_COLOUR, "marker": "o", "label": "torch, undivided (measured)"},
    Curve.UNDIVIDED: {"color": OTHER_COLOUR, "marker": "s", "label": "best algorithm, undivided (measured)"},
    Curve.DIVIDED: {"color": OURS_COLOUR, "label": "divided (solved)"},
}


_MOST_PROBLEMS = 3


_MOST_NOTES = 7


_NOTE_COLUMNS = 46  # characters of a line of notes


def draw_sweep(sweep: BatchSweep) -> Figure:
    """Time and workspace per sample against batch size, of the sum and of the problems that cutting helps most.

    Cliffs are ringed and numbered; beside them stands the cut that removes each.
    """
    shown = _shown(sweep)
    title = f"{sweep.source} up to batch {sweep.up_to}, {memory_bound(sweep.config)}"
    figure = new_figure(14, 1 + 3 * len(shown), title)
    grid = figure.add_gridspec(len(shown), 3, width_ratios=(1, 1, 0.8))
    for row, curves in enumerate(shown):
        time, workspace, notes = (figure.add_subplot(grid[row, column]) for column in range(3))
        _draw_curves(time, curves, lambda point: point.time_per_sample_s * 1e3)
        _draw_curves(workspace, curves, lambda point: point.workspace_per_sample_bytes / 2**20)
        ratio_axis(time)
        workspace.set_ylim(bottom=0)
        _draw_limit(workspace, sweep)
        label(time, f"{name_of(curves)}: time", "batch size", "ms per sample")
        label(workspace, f"{name_of(curves)}: workspace", "batch size", "MiB per sample")
        batch_axis(time, sweep.up_to)
        batch_axis(workspace, sweep.up_to)
        _mark_cliffs(time, workspace, notes, curves.cliffs)
    handles, labels = figure.axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
    return figure


def _shown(sweep: BatchSweep) -> list[Curves]:
    """The sum, and the problems whose cliffs cost most."""
    first, *others = sweep.distinct_curves
    ranked = sorted((curves for curves in others if curves.cliffs), key=_saved_s, reverse=True)
    return [first, *ranked[:_MOST_PROBLEMS]]


def _saved_s(curves: Curves) -> float:
    """Seconds per sample that the best of the cuts saves."""
    saved = [c.point.time_per_sample_s - c.cut.time_per_sample_s for c in curves.cliffs if c.cut is not None]
    return curves.count * max(saved, default=0.0)


def _draw_curves(axes: Axes, curves: Curves, value: Callable[[Point], float]) -> None:
    for curve, style in _STYLES.items():
        points = list(curves.points[curve].values())
        axes.plot([point.n for point in points], [value(point) for point in points], **style)


def _draw_limit(axes: Axes, sweep: BatchSweep) -> None:
    """The limit is of the whole batch: per sample it falls."""
    limit = sweep.config.workspace_limit_bytes
    if limit is not None:
        top = axes.get_ylim()[1]
        sizes = range(1, sweep.up_to + 1)
        shares = [limit / n / 2**20 for n in sizes]
        axes.plot(sizes, shares, color=ALARM_COLOUR, linestyle=":", linewidth=1, label="workspace limit")
        axes.set_ylim(0, top)


def _mark_cliffs(time: Axes, workspace: Axes, notes: Axes, cliffs: Sequence[Cliff]) -> None:
    """Rings with numbers at the points, and the notes to the numbers. Equal notes of both curves share a number."""
    numbers: dict[str, int] = {}
    for cliff in sorted(cliffs, key=lambda cliff: cliff.n):
        number = numbers.setdefault(str(cliff), len(numbers) + 1)
        if cliff.kind is CliffKind.SLOWER:
            _ring(time, number, cliff.n, cliff.point.time_per_sample_s * 1e3)
        else:
            _ring(workspace, number, cliff.n, cliff.point.workspace_per_sample_bytes / 2**20)
    texts = (f"({number}) {words}" for words, number in numbers.items())
    lines = [fill(text, _NOTE_COLUMNS, subsequent_indent="      ") for text in texts]
    if len(lines) > _MOST_NOTES:
        lines[_MOST_NOTES:] = [f"and {len(lines) - _MOST_NOTES} more"]
    notes.set_axis_off()
    notes.text(0, 1, "\n".join(lines or ["no cliffs"]), va="top", fontsize=8, linespacing=1.25)


def _ring(axes: Axes, number: int, x: float, y: float) -> None:
    axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=ALARM_COLOUR, markeredgewidth=1.4)
    axes.annotate(str(number), (x, y), (6, 6), textcoords="offset points", color=ALARM_COLOUR, fontsize=9)
