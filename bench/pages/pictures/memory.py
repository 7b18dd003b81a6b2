"""Draws the memory of each layer: its output, its filter, and the workspace of its operations."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import pandas

from mucudnn.bench.folders.rows import PROBLEM_COLUMNS, problem_of
from mucudnn.bench.pages.measured import has_problems
from mucudnn.bench.pages.pictures.drawing import colours, height, legend_above, one_line, plain, with_series
from mucudnn.bench.pages.pictures.material import Material
from mucudnn.bench.pages.pictures.svg import SERIES
from mucudnn.bench.report.plots import label, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 2**20
_ACTIVATIONS, _PARAMETERS = SERIES[2], SERIES[5]


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
    for index, name in enumerate(series):
        of = layers[layers["series"] == name]
        y = [names.index(layer) + thick * (index + 0.5) - 0.4 for layer in of["layer"]]
        activations, parameters, workspace = (
            of[column] / _MIB for column in ("activation_bytes", "parameter_bytes", "workspace_bytes")
        )
        first = index == 0
        axes.barh(y, activations, 0.9 * thick, color=_ACTIVATIONS, label="activations" if first else None)
        axes.barh(
            *(y, parameters, 0.9 * thick),
            left=activations,
            color=_PARAMETERS,
            label="parameters" if first else None,
        )
        left = activations + parameters
        text = one_line(f"workspace: {name}")
        axes.barh(y, workspace, 0.9 * thick, left=left, color=by_series[name], alpha=0.6, label=text)
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
    rows = rows.assign(layer=rows["layer"] if "layer" in rows else rows["kind"])
    records = []
    for (layer, series), of in rows.groupby(["layer", "series"], sort=False):
        row = of[list(PROBLEM_COLUMNS)].to_dict("records")[0]
        problem = problem_of({str(key): value for key, value in row.items()})
        records.append(
            {
                "layer": str(layer),
                "series": str(series),
                "activation_bytes": prod(problem.y_shape(int(row["batch_size"]))) * problem.item_bytes,
                "parameter_bytes": prod(problem.w_shape()) * problem.item_bytes,
                "workspace_bytes": float(of["workspace_bytes"].max()),
            }
        )
    return pandas.DataFrame(records)
