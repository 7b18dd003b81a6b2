"""Draws rates against the machine's limits (a roofline), and time over the limit by kind of layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mucudnn.bench.pages.drawing import FAINT, MARKERS, colours, height, legend_above, plain, with_series
from mucudnn.bench.pages.material import Material
from mucudnn.bench.pages.measured import has_problems
from mucudnn.bench.report.plots import label, new_figure

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(material: Material) -> Figure | None:
    """Draw all rows whose bound is known; ``None``: there are none."""
    rows = material.rows
    if not has_problems(rows):
        return None
    rows = with_series(rows.dropna(subset=["over_bound"]))
    if rows.empty:
        return None
    kinds, by_series = sorted(set(rows["kind"])), colours(list(rows["series"]))
    present = [name for name in by_series if (rows["series"] == name).any()]
    figure = new_figure(13, height(len(kinds) * len(present), 0.13, 4.5), "")
    rates, boxes = figure.subplots(1, 2)
    _draw_rates(rates, rows, {name: by_series[name] for name in present})
    _draw_boxes(boxes, rows, kinds, {name: by_series[name] for name in present})
    legend_above(figure, *rates.get_legend_handles_labels())
    return figure


def _draw_rates(axes: Axes, rows: pandas.DataFrame, by_series: dict[str, str]) -> None:
    for index, (name, colour) in enumerate(by_series.items()):
        of = rows[rows["series"] == name]
        marker = MARKERS[index % len(MARKERS)]
        rates = of["flops_per_s"] / 1e9
        axes.plot(of["flops_per_byte"], rates, marker, color=colour, markersize=3, alpha=0.7, label=plain(name))
    for _, of in rows.groupby("dtype"):
        roof = of.assign(roof=of["flops"] / of["bound_s"] / 1e9).sort_values("flops_per_byte")
        axes.plot(roof["flops_per_byte"], roof["roof"], color=FAINT, linewidth=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    label(axes, "rate of the direct method", "FLOP for each byte that must move", "GFLOP/s")


def _draw_boxes(axes: Axes, rows: pandas.DataFrame, kinds: list[str], by_series: dict[str, str]) -> None:
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    for index, (name, colour) in enumerate(by_series.items()):
        of = rows[rows["series"] == name]
        present = [place for place, kind in enumerate(kinds) if (of["kind"] == kind).any()]
        values = [of[of["kind"] == kinds[place]]["over_bound"].to_numpy() for place in present]
        y = np.array(present) + 0.8 * ((index + 0.5) / len(by_series) - 0.5)
        thin = {"color": colour, "linewidth": 0.9}
        axes.boxplot(
            values,
            positions=y,
            widths=0.6 / len(by_series),
            orientation="horizontal",
            whis=(0, 100),
            showcaps=False,
            manage_ticks=False,
            boxprops=thin,
            whiskerprops=thin,
            medianprops={"color": colour, "linewidth": 2},
        )
    axes.axvline(1, color=FAINT, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    label(axes, "time / bound by kind of layer", "time / bound", "")
