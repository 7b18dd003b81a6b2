"""Draws the relative error of each algorithm against float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mucudnn.bench.pages.drawing import MARKERS, SERIES, height, legend_above, plain
from mucudnn.bench.pages.material import Material
from mucudnn.bench.report.plots import label, new_figure

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(material: Material) -> Figure | None:
    """Draw a line for each algorithm, the least error first; ``None``: no error is known."""
    known = material.candidates.dropna(subset=["relative_error"])
    known = known[known["relative_error"].astype(float) > 0]
    if known.empty:
        return None
    known = known.assign(relative_error=known["relative_error"].astype(float))
    largest = known.groupby(["subject", "algorithm"], sort=False, as_index=False).agg(
        relative_error=("relative_error", "max"), is_allowed=("is_allowed", "min"), operation=("operation", "first")
    )
    medians = largest.groupby("algorithm")["relative_error"].median().sort_values(kind="stable")
    figure = new_figure(9, height(len(medians), 0.3), "")
    axes = figure.subplots()
    for place, (name, median) in enumerate(medians.items()):
        of = largest[largest["algorithm"] == name]
        _draw_algorithm(axes, of, place, list(dict.fromkeys(largest["operation"])))
        axes.plot([median, median], [place - 0.3, place + 0.3], color=SERIES[-1], linewidth=1.5)
    axes.set_xscale("log")
    axes.set_yticks(range(len(medians)), [plain(str(name)) for name in medians.index], fontsize=8)
    axes.set_ylim(len(medians) - 0.4, -0.6)
    label(axes, "", "relative L2 error against float64", "")
    handles = {text: one for one, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    legend_above(figure, list(handles.values()), list(handles))
    return figure


def _draw_algorithm(axes: Axes, rows: pandas.DataFrame, place: int, operations: list[str]) -> None:
    """Draw the problems of one algorithm, operations a little apart."""
    for index, operation in enumerate(operations):
        of = rows[rows["operation"] == operation]
        y = np.full(len(of), place + 0.5 * ((index + 0.5) / len(operations) - 0.5))
        barred = ~of["is_allowed"].astype(bool).to_numpy()
        style: dict[str, Any] = {"color": SERIES[index], "markersize": 3.5, "linestyle": "none"}
        errors = of["relative_error"].to_numpy()
        axes.plot(errors[~barred], y[~barred], MARKERS[index], label=operation.replace("_", " "), **style)
        axes.plot(errors[barred], y[barred], "x", **style)
