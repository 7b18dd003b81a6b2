"""Draws the memory of each layer: its output, its filter, and the workspace of its operations."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import pandas

from mucudnn.bench.folders.rows import PROBLEM_COLUMNS, problem_of
from mucudnn.bench.pages.drawing import (
    SERIES,
    Rectangle,
    colours,
    draw_rectangles,
    height,
    legend_above,
    one_line,
    plain,
    with_series,
)
from mucudnn.bench.pages.material import Material
from mucudnn.bench.pages.measured import has_problems
from mucudnn.bench.report.plots import label, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 2**20
_PARTS = {"activations": SERIES[2], "parameters": SERIES[5]}


def draw(material: Material) -> Figure | None:
    """Draw a group of bars for each layer, one for each contestant that has workspaces; ``None``: none has."""
    layers = memory_of_layers(material.rows)
    if layers.empty:
        return None
    names, series = list(dict.fromkeys(layers["layer"])), list(dict.fromkeys(layers["series"]))
    by_series = colours(series)
    figure = new_figure(9, height(len(names), 0.12 + 0.09 * len(series)), "")
    axes = figure.subplots()
    thick = 0.8 / len(series)
    every = {name: (colour, 1.0, list[Rectangle]()) for name, colour in _PARTS.items()}
    every |= {f"workspace: {name}": (by_series[name], 0.6, list[Rectangle]()) for name in series}
    for row in layers.to_dict("records"):
        upper = names.index(row["layer"]) + thick * series.index(row["series"]) - 0.4
        left = 0.0
        for name, size in (
            ("activations", row["activation_bytes"]),
            ("parameters", row["parameter_bytes"]),
            (f"workspace: {row['series']}", row["workspace_bytes"]),
        ):
            right = left + size / _MIB
            every[name][-1].append((left, right, upper, upper + 0.9 * thick))
            left = right
    for name, (colour, alpha, rectangles) in every.items():
        draw_rectangles(axes, rectangles, colour, alpha=alpha, label=one_line(name))
    axes.autoscale_view()
    axes.set_xlim(left=0)
    axes.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=7)
    axes.set_ylim(len(names) - 0.4, -0.6)
    label(axes, "", "MiB", "")
    legend_above(figure, *axes.get_legend_handles_labels())
    return figure


def memory_of_layers(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each layer and contestant with workspaces, in bytes.

    Columns: ``layer``, ``series``, ``activation_bytes`` (the output of the forward pass), ``parameter_bytes`` (the
    filter), ``workspace_bytes`` (the largest of its operations).
    """
    if not has_problems(rows):
        return pandas.DataFrame()
    rows = with_series(rows.dropna(subset=["workspace_bytes"]))
    rows = rows.assign(layer=rows["layer"] if "layer" in rows else rows["kind"]).dropna(subset=["layer"])
    bars = ["layer", "series"]
    largest = rows.groupby(bars, sort=False)["workspace_bytes"].max()
    firsts = rows.drop_duplicates(bars)[[*bars, *PROBLEM_COLUMNS]].to_dict("records")
    return pandas.DataFrame([_record(row, most) for row, most in zip(firsts, largest, strict=True)])


def _record(row: Mapping[Hashable, Any], workspace_bytes: float) -> dict[str, Any]:
    problem = problem_of({name: row[name] for name in PROBLEM_COLUMNS})
    return {
        "layer": str(row["layer"]),
        "series": str(row["series"]),
        "activation_bytes": prod(problem.y_shape(int(row["batch_size"]))) * problem.item_bytes,
        "parameter_bytes": prod(problem.w_shape()) * problem.item_bytes,
        "workspace_bytes": workspace_bytes,
    }
