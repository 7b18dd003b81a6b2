"""Draws the speedup of each layer under each workspace limit, one column of points for each operation."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING

from mucudnn.bench.pages.drawing import FAINT, MARKERS, colours, height, legend_above, plain, with_series
from mucudnn.bench.pages.material import Material
from mucudnn.bench.pages.measured import has_problems
from mucudnn.bench.report.plots import label, new_figure
from mucudnn.words.problem import Operation

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(material: Material) -> Figure | None:
    """Draw all rows that have a speedup; ``None``: there are none, or they are not of convolutions."""
    rows = material.rows
    if not has_problems(rows):
        return None
    rows = with_series(rows.dropna(subset=["speedup"]))
    if rows.empty:
        return None
    places = {layer: place for place, layer in enumerate(dict.fromkeys(_layers(rows)))}
    operations = [name for name in Operation if (rows["operation"] == name).any()]
    figure = new_figure(4 + 3 * len(operations), height(len(places), 0.2), "")
    every = figure.subplots(1, len(operations), sharey=True, squeeze=False)[0]
    for axes, operation in zip(every, operations, strict=True):
        _draw_operation(axes, rows[rows["operation"] == operation], places, colours(list(rows["series"])))
        label(axes, operation.replace("_", " "), "speedup over torch", "")
    every[0].set_yticks(list(places.values()), [plain(layer) for layer in places], fontsize=7)
    every[0].set_ylim(len(places) - 0.4, -0.6)
    legend_above(figure, *every[0].get_legend_handles_labels())
    return figure


def _draw_operation(axes: Axes, rows: pandas.DataFrame, places: dict[str, int], by_series: dict[str, str]) -> None:
    """Draw one operation: the series of a layer lie a little apart."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    names = list(by_series)[1:]
    for index, name in enumerate(names):
        of = rows[rows["series"] == name]
        y = [places[layer] + 0.7 * ((index + 0.5) / len(names) - 0.5) for layer in _layers(of)]
        every = zip(of["speedup_low"], of["speedup_high"], y, strict=True)
        points = [point for low, high, place in every for point in ((low, place), (high, place), (nan, nan))]
        axes.plot(*zip(*points, strict=True), color=by_series[name], linewidth=0.8)  # one line: it is a small file
        axes.plot(
            of["speedup"], y, MARKERS[index % len(MARKERS)], color=by_series[name], markersize=2.5, label=plain(name)
        )
    axes.axvline(1, color=FAINT, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _layers(rows: pandas.DataFrame) -> list[str]:
    names = rows["layer"] if "layer" in rows else rows["kind"]
    return [str(name) for name in names]
