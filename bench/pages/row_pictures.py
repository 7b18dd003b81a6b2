"""Pictures of the rows of a result folder. Each function returns ``None`` if the report has no rows for its picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import nan, prod
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas

from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.rows import problem_of
from mucudnn.bench.pages.drawing import (
    FAINT,
    MARKERS,
    SERIES,
    beside,
    colours,
    draw_bars,
    draw_boxes,
    draw_samples,
    legend_above,
    named_rows,
    one_line,
    panels,
    plain,
    series_label,
    with_series,
    x_ratio_axis,
)
from mucudnn.bench.pages.kinds import MOST_PIECES, MOST_SUBJECTS
from mucudnn.bench.pages.measured import UNDIVIDED, gains, has_problems, published_gains_of, with_layers
from mucudnn.bench.pages.report import Report, name_of
from mucudnn.bench.report.plots import label, new_figure
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Operation
from mucudnn.words.results import MicroConfig, counts_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 2**20
_GAP = 0.4  # gap between pieces, in percent of the mini-batch


def speedups(report: Report) -> Figure | None:
    """Draw the speedup of each layer under each workspace limit, with one panel for each operation."""
    if not has_problems(report.rows):
        return None
    rows = with_series(with_layers(report.rows.dropna(subset=["speedup"])))
    if rows.empty:
        return None
    layers, by_series = list(dict.fromkeys(rows["layer"])), colours(rows["series"])
    figure, every = _by_operation(rows, layers, 0.2, "speedup over PyTorch")
    for axes, of in every:
        for index, (name, colour) in enumerate(by_series.items()):
            points = of[of["series"] == name]
            y = beside([layers.index(layer) for layer in points["layer"]], index, len(by_series))
            ends = np.column_stack([points["speedup_low"], points["speedup_high"], np.full(len(points), nan)])
            axes.plot(ends.ravel(), np.repeat(y, 3), color=colour, linewidth=0.8)  # a single line keeps the file small
            marker = MARKERS[index % len(MARKERS)]
            axes.plot(points["speedup"], y, marker, color=colour, markersize=2.5, label=plain(name))
        x_ratio_axis(axes)
    legend_above(figure)
    return figure


def _by_operation(
    rows: pandas.DataFrame, layers: Sequence[str], row_inches: float, unit: str
) -> tuple[Figure, list[tuple[Axes, pandas.DataFrame]]]:
    """Create a figure that lists the layers; return it with pairs of axes and rows, one for each operation."""
    operations = [name for name in Operation if (rows["operation"] == name).any()]
    figure, every = named_rows(layers, row_inches, 4 + 3 * len(operations), len(operations))
    for axes, operation in zip(every, operations, strict=True):
        label(axes, operation.replace("_", " "), unit, "")
    return figure, [(axes, rows[rows["operation"] == name]) for axes, name in zip(every, operations, strict=True)]


def divided(report: Report) -> Figure | None:
    """Draw the speedup of dividing over the best undivided algorithm, next to the speedups in the paper."""
    found = gains(report.rows)
    if found.empty or (found := found.dropna(subset=["gain"])).empty:
        return None
    layers = list(dict.fromkeys(found["layer"]))
    published = published_gains_of(found)
    columns = 2 if len(published) else 1
    figure, every = named_rows([str(layer) for layer in layers], 0.28, 5 + 4 * columns, columns)
    titles = ("measured here", "published elsewhere: P100-SXM2, N = 256")
    for axes, title in zip(every, titles, strict=False):
        axes.axvline(1, color=FAINT, linewidth=1)
        label(axes, title, "time of the undivided / divided", "")
    choices = zip(found["policy"], found["limit_bytes"], strict=True)
    found = found.assign(series=[series_label("mucudnn", *choice) for choice in choices])
    by_name = colours(found["series"])
    for index, (name, colour) in enumerate(by_name.items()):
        of = found[found["series"] == name]
        y = beside([layers.index(layer) for layer in of["layer"]], index, len(by_name))
        ends = [of["gain"] - of["gain_low"].fillna(of["gain"]), of["gain_high"].fillna(of["gain"]) - of["gain"]]
        every[0].barh(y, of["gain"], 0.72 / len(by_name), color=colour, label=plain(name))
        every[0].errorbar(of["gain"], y, xerr=np.maximum(ends, 0), fmt="none", ecolor=FAINT, elinewidth=0.8)
    if len(published):
        limits = published.drop(columns="layer")
        for index, (limit, colour) in enumerate(zip(limits, (SERIES[6], SERIES[4], SERIES[3]), strict=True)):
            y = beside([layers.index(layer) for layer in published["layer"]], index, limits.shape[1])
            name = f"published, {str(limit).replace('MiB', ' MiB')}"
            every[1].barh(y, limits[limit], 0.72 / limits.shape[1], color=colour, alpha=0.6, label=name)
    legend_above(figure)
    return figure


def limits(report: Report) -> Figure | None:
    """Draw a roofline plot (achieved rates against peak rates), and the ratio of time to bound by kind of layer."""
    if not has_problems(report.rows):
        return None
    rows = with_series(report.rows.dropna(subset=["over_bound"]))
    if rows.empty:
        return None
    kinds, by_series = sorted(set(rows["kind"])), colours(rows["series"])
    figure = new_figure(13, max(4.5, 1.3 + 0.13 * len(kinds) * len(by_series)), "")
    rates, boxes = figure.subplots(1, 2)
    for index, (name, colour) in enumerate(by_series.items()):
        of = rows[rows["series"] == name]
        style: dict[str, Any] = {"color": colour, "markersize": 3, "alpha": 0.7, "label": plain(name)}
        rates.plot(of["flops_per_byte"], of["flops_per_s"] / 1e9, MARKERS[index % len(MARKERS)], **style)
        groups = [(place, one["over_bound"]) for place, kind in enumerate(kinds) if len(one := of[of["kind"] == kind])]
        y = beside([place for place, _ in groups], index, len(by_series))
        draw_boxes(boxes, [group for _, group in groups], list(y), 0.6 / len(by_series), colour, whis=(0, 100))
    for _, of in rows.groupby("dtype"):
        roof = of.assign(roof=of["flops"] / of["bound_s"] / 1e9).sort_values("flops_per_byte")
        rates.plot(roof["flops_per_byte"], roof["roof"], color=FAINT, linewidth=1.2)
    rates.set_xscale("log")
    rates.set_yscale("log")
    label(rates, "rate of the direct method", "FLOP for each byte that must move", "GFLOP/s")
    x_ratio_axis(boxes)
    boxes.set_yticks(range(len(kinds)), kinds)
    boxes.set_ylim(len(kinds) - 0.5, -0.5)
    label(boxes, "time / bound by kind of layer", "time / bound", "")
    legend_above(figure)
    return figure


def samples(report: Report) -> Figure | None:
    """Draw every time sample of each contestant, for the subjects on which torch takes longest."""
    rows = with_series(report.rows[report.rows["samples_s"].map(len) > 0])
    if rows.empty:
        return None
    longest = rows[rows["contestant"] == TORCH].sort_values("time_s", ascending=False, kind="stable")["turns"]
    turns = list(dict.fromkeys([*longest, *rows["turns"]]))[:MOST_SUBJECTS]
    by_series = colours(rows["series"])
    figure, every = panels(len(turns), 1.1 + 0.22 * rows["series"].nunique())
    for axes, number in zip(every, turns, strict=True):
        of = rows[rows["turns"] == number]
        draw_samples(axes, zip(of["series"], of["samples_s"], of["series"].map(by_series), strict=True))
        label(axes, plain(name_of(of.iloc[0].to_dict())), "ms", "")
    return figure


def cuts(report: Report) -> Figure | None:
    """Draw how mini-batches are divided: a bar for each layer and operation, with a piece for each micro-batch."""
    rows = report.rows
    if not has_problems(rows):
        return None
    rows = rows[rows["configuration"].notna() & rows["policy"].notna() & (rows["policy"] != UNDIVIDED)]
    rows = with_series(with_layers(rows))
    rows = rows.assign(cuts=rows["configuration"].map(_cuts))
    rows = rows[rows["cuts"].map(len) > 0]
    if rows.empty:
        return None
    layers, series = list(dict.fromkeys(rows["layer"])), list(dict.fromkeys(rows["series"]))
    by_algorithm = colours(micro_config.algorithm for cuts in rows["cuts"] for micro_config, _ in cuts)
    figure, every = _by_operation(rows, layers, 0.12 + 0.05 * len(series), "share of the mini-batch, %")
    for axes, of in every:
        bars = [
            (beside(layers.index(layer), series.index(name), len(series)), *piece)
            for layer, name, cuts in zip(of["layer"], of["series"], of["cuts"], strict=True)
            for piece in pieces(cuts)
        ]
        frame = pandas.DataFrame(bars, columns=["y", "algorithm", "left", "right"])
        for algorithm, group in frame.groupby("algorithm", sort=False):
            style: dict[str, Any] = {"colour": by_algorithm[str(algorithm)], "label": plain(str(algorithm))}
            draw_bars(axes, group["y"], 100 * group["left"], 100 * group["right"] - _GAP, 0.68 / len(series), **style)
        axes.set_xlim(0, 100)
    figure.supxlabel(f"from top to bottom in each layer: {one_line('; '.join(series))}", fontsize=8)
    legend_above(figure)
    return figure


def _cuts(text: str) -> tuple[tuple[MicroConfig, int], ...]:
    """Parse a configuration into its micro-batches; return an empty tuple if its text is invalid."""
    try:
        return counts_in(text)
    except InvalidInputError:
        return ()


def pieces(cuts: Sequence[tuple[MicroConfig, int]]) -> Iterator[tuple[str, float, float]]:
    """Yield the pieces of a bar of micro-batches: the algorithm of each piece, its start and its end (0 to 1)."""
    whole = sum(micro_config.micro_batch_size * count for micro_config, count in cuts)
    done = 0
    for micro_config, count in cuts:
        samples = micro_config.micro_batch_size * count
        parts = count if count <= MOST_PIECES else 1
        for part in range(parts):
            begin, end = done + samples * part / parts, done + samples * (part + 1) / parts
            yield micro_config.algorithm, begin / whole, end / whole
        done += samples


def memory(report: Report) -> Figure | None:
    """Draw the memory of each layer: its output, its filter, and the workspace of its operations."""
    layers = memory_of_layers(report.rows)
    if layers.empty:
        return None
    names, by_series = list(dict.fromkeys(layers["layer"])), colours(layers["series"])
    figure, (axes,) = named_rows(names, 0.12 + 0.09 * len(by_series), 9)
    places = [names.index(name) for name in layers["layer"]]
    order = [list(by_series).index(name) for name in layers["series"]]
    y, thickness = beside(places, order, len(by_series)), 0.72 / len(by_series)
    ends = layers[["activation_bytes", "parameter_bytes", "workspace_bytes"]].cumsum(axis=1).to_numpy() / _MIB
    draw_bars(axes, y, 0 * y, ends[:, 0], thickness, SERIES[2], label="activations")
    draw_bars(axes, y, ends[:, 0], ends[:, 1], thickness, SERIES[5], label="parameters")
    for name, colour in by_series.items():
        of = layers["series"] == name
        style: dict[str, Any] = {"alpha": 0.6, "label": one_line(f"workspace: {name}")}
        draw_bars(axes, y[of], ends[of, 1], ends[of, 2], thickness, colour, **style)
    axes.autoscale_view(scaley=False)
    axes.set_xlim(left=0)
    label(axes, "", "MiB", "")
    legend_above(figure)
    return figure


def memory_of_layers(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row of sizes in bytes for each layer and each contestant that has workspaces.

    Columns: ``layer``, ``series``, ``activation_bytes`` (the output of the forward pass), ``parameter_bytes`` (the
    filter), ``workspace_bytes`` (the largest over the layer's operations).
    """
    if not has_problems(rows):
        return pandas.DataFrame()
    rows = with_series(with_layers(rows.dropna(subset=["workspace_bytes"])))
    bars = rows.groupby(["layer", "series"], sort=False)
    largest = rows.assign(workspace_bytes=bars["workspace_bytes"].transform("max")).drop_duplicates(["layer", "series"])
    return pandas.DataFrame(map(_memory, largest.to_dict("records")))


def _memory(row: Mapping[Any, Any]) -> dict[str, Any]:
    problem = problem_of(row)
    return {
        **{name: row[name] for name in ("layer", "series", "workspace_bytes")},
        "activation_bytes": prod(problem.y_shape(int(row["batch_size"]))) * problem.item_bytes,
        "parameter_bytes": prod(problem.w_shape()) * problem.item_bytes,
    }


def tuning(report: Report) -> Figure | None:
    """Draw the duration of tuning under each policy and workspace limit, and the solver's share of it."""
    rows = with_series(report.rows[report.rows["policy"].notna()])
    sums = pandas.DataFrame(
        {
            name: pandas.to_numeric(rows[name], errors="coerce").groupby(rows["series"], sort=False).sum(min_count=1)
            for name in ("tuning_s", "solve_s")
            if name in rows
        }
    ).dropna(axis=1, how="all")
    if sums.empty:
        return None
    figure, every = named_rows([str(name) for name in sums.index], 0.3, 4 + 4 * sums.shape[1], sums.shape[1])
    for axes, (name, lengths) in zip(every, sums.fillna(0.0).items(), strict=True):
        if name == "tuning_s":
            axes.barh(range(len(sums)), lengths, 0.7, left=lengths.cumsum() - lengths, color=SERIES[0])
            label(axes, "tuning", "s, one after the other", "")
        else:
            axes.barh(range(len(sums)), lengths * 1e3, 0.7, color=SERIES[0])
            label(axes, "solving", "ms", "")
    return figure
