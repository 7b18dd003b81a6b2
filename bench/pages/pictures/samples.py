"""Draws the samples of each contestant on the subjects that take torch longest: violins, boxes, every sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.pages.drawing import colours, draw_samples, name_places, panels, plain, with_series
from mucudnn.bench.pages.material import Material, name_of
from mucudnn.bench.pages.pictures.kinds import MOST_SUBJECTS
from mucudnn.bench.report.plots import label

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(material: Material) -> Figure | None:
    """Draw the rows that were measured in the same turns side by side; ``None``: there are no samples."""
    rows = with_series(material.rows[material.rows["samples_s"].map(len) > 0])
    if rows.empty:
        return None
    longest = rows[rows["contestant"] == TORCH].sort_values("time_s", ascending=False, kind="stable")["turns"]
    turns = list(dict.fromkeys([*longest, *rows["turns"]]))[:MOST_SUBJECTS]
    by_series = colours(list(rows["series"]))
    figure, every = panels(len(turns), 1.1 + 0.22 * rows["series"].nunique())
    for axes, number in zip(every, turns, strict=True):
        _draw_turns(axes, rows[rows["turns"] == number], by_series)
    return figure


def _draw_turns(axes: Axes, rows: pandas.DataFrame, by_series: dict[str, str]) -> None:
    for place, (name, samples) in enumerate(zip(rows["series"], rows["samples_s"], strict=True)):
        draw_samples(axes, samples, place, by_series[name])
    name_places(axes, list(rows["series"]))
    label(axes, plain(name_of(rows.iloc[0].to_dict())), "ms", "")
