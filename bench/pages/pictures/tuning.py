"""Draws how long tuning took for each policy and limit, and how long the solver did of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas

from mucudnn.bench.pages.drawing import SERIES, height, plain, with_series
from mucudnn.bench.pages.material import Material
from mucudnn.bench.report.plots import label, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(material: Material) -> Figure | None:
    """Draw the sums that rows have; ``None``: no row says how long tuning or solving took."""
    rows = material.rows
    known = [name for name in ("tuning_s", "solve_s") if name in rows and _numbers(rows, name).notna().any()]
    if not known or rows["policy"].isna().all():
        return None
    rows = with_series(rows[rows["policy"].notna()])
    sums = pandas.DataFrame({name: _numbers(rows, name).groupby(rows["series"], sort=False).sum() for name in known})
    figure = new_figure(4 + 4 * len(known), height(len(sums), 0.3), "")
    every = figure.subplots(1, len(known), sharey=True, squeeze=False)[0]
    for axes, name in zip(every, known, strict=True):
        if name == "tuning_s":
            _draw_bars(axes, sums[name], sums[name].cumsum() - sums[name])
            label(axes, "tuning", "s, one after the other", "")
        else:
            _draw_bars(axes, sums[name] * 1e3, 0)
            label(axes, "solving", "ms", "")
    every[0].set_yticks(range(len(sums)), [plain(str(name)) for name in sums.index], fontsize=8)
    every[0].set_ylim(len(sums) - 0.4, -0.6)
    return figure


def _numbers(rows: pandas.DataFrame, name: str) -> pandas.Series[float]:
    return pandas.to_numeric(rows[name], errors="coerce")


def _draw_bars(axes: Axes, lengths: pandas.Series[float], left: pandas.Series[float] | int) -> None:
    axes.barh(range(len(lengths)), lengths, 0.7, left=left, color=SERIES[0])
