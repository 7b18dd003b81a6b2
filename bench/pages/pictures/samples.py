"""Draws the samples of each contestant on the subjects that take torch longest: violins with every sample in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from mucudnn.bench.contests.torch_variants import TORCH
from mucudnn.bench.pages.pictures.drawing import colours, plain, with_series
from mucudnn.bench.pages.pictures.svg import FAINT
from mucudnn.bench.report.plots import label, new_figure

if TYPE_CHECKING:
    import pandas
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 12
_COLUMNS = 3
CAPTION = (
    f"The {MOST} operations that take torch longest: every sample is a point, violins show where they lie. "
    "mucudnn plot samples DIR --layer NAME draws those of any layer."
)


def draw(rows: pandas.DataFrame) -> Figure | None:
    """Draw the rows that were measured in the same turns side by side; ``None``: there are no samples."""
    rows = with_series(rows[rows["samples_s"].map(len) > 0])
    if rows.empty:
        return None
    longest = rows[rows["contestant"] == TORCH].sort_values("time_s", ascending=False, kind="stable")["turns"]
    turns = list(dict.fromkeys([*longest, *rows["turns"]]))[:MOST]
    columns = min(_COLUMNS, len(turns))
    lines = -(-len(turns) // columns)
    by_series = colours(list(rows["series"]))
    figure = new_figure(4.4 * columns, lines * (1.1 + 0.22 * rows["series"].nunique()), "")
    every = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, number in zip(every, turns, strict=False):
        _draw_turns(axes, rows[rows["turns"] == number], by_series)
    for axes in every[len(turns) :]:
        axes.set_visible(False)
    return figure


def _draw_turns(axes: Axes, rows: pandas.DataFrame, by_series: dict[str, str]) -> None:
    for place, (name, samples) in enumerate(zip(rows["series"], rows["samples_s"], strict=True)):
        times, colour = np.array(samples) * 1e3, by_series[name]
        if np.ptp(times) > 0:
            violin = axes.violinplot(
                [times], [place], orientation="horizontal", widths=0.85, showextrema=False, points=40
            )
            for body in cast("list[Artist]", violin["bodies"]):
                body.set(facecolor=colour, alpha=0.3)
        axes.plot(times, np.full(len(times), place), "|", color=colour, markersize=4)
        axes.plot([np.median(times)], [place], "D", color=colour, markersize=3)
    axes.set_yticks(range(len(rows)), [plain(name) for name in rows["series"]], fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    first = rows.iloc[0]
    title = " ".join(str(first[name]) for name in ("layer", "operation") if name in rows)
    label(axes, plain(title), "ms", "")
    axes.spines[["left"]].set_color(FAINT)
