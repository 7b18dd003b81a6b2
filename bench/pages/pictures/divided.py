"""Draws what dividing gains over the best undivided algorithm: the figure of the paper, its own bars beside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas

from mucudnn.bench.pages.drawing import FAINT, SERIES, height, legend_above, plain, ranked_colours, series_label
from mucudnn.bench.pages.gains import gains, published_gains_of
from mucudnn.bench.pages.material import Material
from mucudnn.bench.report.plots import label, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PUBLISHED = (SERIES[6], SERIES[4], SERIES[3])


def draw(material: Material) -> Figure | None:
    """Draw a bar for each layer, policy and limit; ``None``: nothing was timed beside its best undivided algorithm."""
    found = gains(material.rows)
    found = found.dropna(subset=["gain"]) if len(found) else found
    if found.empty:
        return None
    layers = list(dict.fromkeys(found["layer"]))
    published = published_gains_of(found)
    figure = new_figure(13 if len(published) else 9, height(len(layers), 0.28), "")
    every = figure.subplots(1, 2 if len(published) else 1, sharey=True, squeeze=False)[0]
    _draw_ours(every[0], found, layers)
    label(every[0], "measured here", "time of the undivided / divided", "")
    if len(published):
        _draw_published(every[1], published, layers)
        label(every[1], "published elsewhere: P100-SXM2, N = 256", "time of the undivided / divided", "")
    every[0].set_yticks(range(len(layers)), [plain(str(layer)) for layer in layers], fontsize=7)
    every[0].set_ylim(len(layers) - 0.4, -0.6)
    for axes in every:
        axes.axvline(1, color=FAINT, linewidth=1)
    handles, texts = zip(*(axes.get_legend_handles_labels() for axes in every), strict=True)
    legend_above(figure, [one for each in handles for one in each], [text for each in texts for text in each])
    return figure


def _draw_ours(axes: Axes, found: pandas.DataFrame, layers: list[str]) -> None:
    choices = zip(found["policy"], found["limit_bytes"], strict=True)
    found = found.assign(series=[series_label("mucudnn", *choice) for choice in choices])
    series = list(dict.fromkeys(found["series"]))
    by_name = ranked_colours(series)
    thick = 0.8 / len(series)
    for index, name in enumerate(series):
        of = found[found["series"] == name]
        y = np.array([layers.index(layer) for layer in of["layer"]]) + thick * (index + 0.5) - 0.4
        ends = [of["gain"] - of["gain_low"].fillna(of["gain"]), of["gain_high"].fillna(of["gain"]) - of["gain"]]
        axes.barh(y, of["gain"], 0.9 * thick, color=by_name[name], label=plain(name))
        axes.errorbar(of["gain"], y, xerr=np.maximum(ends, 0), fmt="none", ecolor=FAINT, elinewidth=0.8)


def _draw_published(axes: Axes, published: pandas.DataFrame, layers: list[str]) -> None:
    limits = [name for name in published.columns if name != "layer"]
    places = np.array([layers.index(layer) for layer in published["layer"]])
    thick = 0.8 / len(limits)
    for index, (limit, colour) in enumerate(zip(limits, _PUBLISHED, strict=True)):
        y = places + thick * (index + 0.5) - 0.4
        name = f"published, {limit.replace('MiB', ' MiB')}"
        axes.barh(y, published[limit], 0.9 * thick, color=colour, alpha=0.6, label=name)
