"""Pictures of a result folder, embedded in its page or written as files.

Each function that draws one returns ``None`` if the report has no data for its picture.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas

from mucudnn.bench.results.pages.drawing import (
    FAINT,
    MARKERS,
    SERIES,
    STYLE,
    TORCH_COLOUR,
    batch_axis,
    beside,
    colours,
    draw_boxes,
    label,
    legend_above,
    named_rows,
    new_figure,
    panels,
    plain,
    ratio_axis,
    require_matplotlib,
    series_label,
    svg,
    with_series,
    x_ratio_axis,
)
from mucudnn.bench.results.pages.kinds import KINDS, MOST_SUBJECTS, Kind
from mucudnn.bench.results.pages.measured import gains, has_problems, published_gains_of, with_layers
from mucudnn.bench.results.pages.report import Report, Subject
from mucudnn.bench.results.variants import TORCH
from mucudnn.core.errors import UnavailableError
from mucudnn.core.files import whole_file
from mucudnn.core.problem import Operation
from mucudnn.core.torch_settings import TORCHS_OWN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 2**20


def drawn(report: Report) -> Iterator[tuple[str, bytes]]:
    """Yield the name of each picture that the report has data for, and its SVG file.

    Raises ``UnavailableError`` if matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib import rc_context

    with rc_context(STYLE):
        for name, draw in _DRAW.items():
            if (figure := draw(report)) is not None:
                yield name, svg(figure)


def pictures_or_reason(report: Report) -> tuple[list[tuple[Kind, str]], str]:
    """Return the pictures that can be drawn, each with its ``src``, or the reason if matplotlib is not installed."""
    try:
        return [
            (KINDS[name], f"data:image/svg+xml;base64,{b64encode(picture).decode()}") for name, picture in drawn(report)
        ], ""
    except UnavailableError as error:
        return [], str(error)


def write_pictures(report: Report, folder: Path) -> list[Path]:
    """Write each picture of a report as an SVG file into a folder; return the files.

    Raises ``UnavailableError`` if matplotlib is not installed, and ``OutputError`` if a file cannot be written.
    """
    files = []
    for name, picture in drawn(report):
        files.append(folder / f"{name}.svg")
        with whole_file(files[-1]) as stream:
            stream.write(picture)
    return files


def speedups(report: Report) -> Figure | None:
    """Draw the speedup of each layer under each workspace limit, with one panel for each operation."""
    if not has_problems(report.rows):
        return None
    rows = with_series(with_layers(report.rows.dropna(subset=["speedup"])))
    if rows.empty:
        return None
    layers, by_series = list(dict.fromkeys(rows["layer"])), colours(rows["series"])
    operations = [name for name in Operation if (rows["operation"] == name).any()]
    figure, every = named_rows(layers, 0.2, 4 + 3 * len(operations), len(operations))
    for axes, operation in zip(every, operations, strict=True):
        label(axes, operation.replace("_", " "), "speedup over PyTorch", "")
        for index, (name, colour) in enumerate(by_series.items()):
            points = rows[(rows["operation"] == operation) & (rows["series"] == name)]
            y = beside([layers.index(layer) for layer in points["layer"]], index, len(by_series))
            ends = np.column_stack([points["speedup_low"], points["speedup_high"], np.full(len(points), nan)])
            axes.plot(ends.ravel(), np.repeat(y, 3), color=colour, linewidth=0.8)  # a single line keeps the file small
            marker = MARKERS[index % len(MARKERS)]
            axes.plot(points["speedup"], y, marker, color=colour, markersize=2.5, label=plain(name))
        x_ratio_axis(axes)
    legend_above(figure)
    return figure


def divided(report: Report) -> Figure | None:
    """Draw the speedup of dividing over the best undivided algorithm, next to the speedups in the paper."""
    found = gains(report.rows)
    if found.empty or (found := found[found["gain"].notna() & ~found["is_same"]]).empty:
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
    figure = new_figure(13, max(4.5, 1.3 + 0.13 * len(kinds) * len(by_series)))
    rates, boxes = figure.subplots(1, 2)
    for index, (name, colour) in enumerate(by_series.items()):
        of = rows[rows["series"] == name]
        style: dict[str, Any] = {"color": colour, "markersize": 3, "alpha": 0.7, "label": plain(name)}
        rates.plot(of["flops_per_byte"], of["flops_per_s"] / 1e9, MARKERS[index % len(MARKERS)], **style)
        groups = [(place, one["over_bound"]) for place, kind in enumerate(kinds) if len(one := of[of["kind"] == kind])]
        y = beside([place for place, _ in groups], index, len(by_series))
        draw_boxes(boxes, [group for _, group in groups], list(y), 0.6 / len(by_series), colour)
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


def desirable(report: Report) -> Figure | None:
    """Draw each desirable set (time against workspace), and the undivided algorithms as points."""
    every = list(islice((subject for subject in report.subjects if len(subject.desirable)), MOST_SUBJECTS))
    if not every:
        return None
    figure, panel = panels(len(every), 2.6)
    for axes, subject in zip(panel, every, strict=True):
        _draw_desirable(axes, subject)
        label(axes, plain(subject.name), "workspace, MiB", "ms")
    legend_above(figure)
    return figure


def _draw_desirable(axes: Axes, subject: Subject) -> None:
    points, undivided = subject.desirable.sort_values("workspace_bytes"), _undivided_costs(subject)
    sizes, times = list(points["workspace_bytes"] / _MIB), list(points["time_s"] * 1e3)
    end = max([*sizes, *undivided["workspace_bytes"] / _MIB])
    axes.step([*sizes, end], [*times, times[-1]], where="post", color=SERIES[0], label="desirable set")
    axes.plot(sizes, times, ".", color=SERIES[0], markersize=4)
    own = undivided["algorithm"] == TORCHS_OWN
    for of, colour, name in ((~own, SERIES[1], "undivided"), (own, TORCH_COLOUR, "PyTorch, undivided")):
        x, y = undivided["workspace_bytes"][of] / _MIB, undivided["time_s"][of] * 1e3
        axes.plot(x, y, "s", color=colour, markersize=4, label=name)
    axes.set_ylim(bottom=0)


def _undivided_costs(subject: Subject) -> pandas.DataFrame:
    """Return ``algorithm``, ``time_s`` and ``workspace_bytes`` of each algorithm run on the whole mini-batch.

    The costs follow the solver's model (``solver.front.pool``), which pools an algorithm's setup time and prepared
    bytes over all its micro-batch sizes. Otherwise a point could lie below the desirable set.
    """
    every = subject.allowed.groupby("algorithm")
    whole = subject.allowed[subject.allowed["micro_batch_size"] == subject.batch_size]
    return pandas.DataFrame(
        {
            "algorithm": whole["algorithm"],
            "time_s": whole["algorithm"].map(every["setup_s"].median()) + whole["step_s"],
            "workspace_bytes": whole["algorithm"].map(every["prepared_bytes"].max()) + whole["scratch_bytes"],
        }
    )


def micro_batches(report: Report) -> Figure | None:
    """Draw the time per sample in ms against the micro-batch size, with a line for each algorithm."""
    divided = (subject for subject in report.subjects if subject.allowed["micro_batch_size"].nunique() > 1)
    every = list(islice(divided, MOST_SUBJECTS))
    if not every:
        return None
    by_name = colours(name for subject in every for name in subject.allowed["algorithm"])
    markers = {name: MARKERS[index % len(MARKERS)] for index, name in enumerate(by_name)}
    figure, panel = panels(len(every), 2.6)
    for axes, subject in zip(panel, every, strict=True):
        for name, of in subject.allowed.sort_values("micro_batch_size").groupby("algorithm", sort=False):
            style: dict[str, Any] = {"marker": markers[str(name)], "color": by_name[str(name)], "markersize": 3}
            sizes = of["micro_batch_size"]
            axes.plot(sizes, of["step_s"] / sizes * 1e3, label=plain(str(name)), **style)
        ratio_axis(axes)
        batch_axis(axes, subject.batch_size)
        label(axes, plain(subject.name), "micro-batch size", "ms per sample")
    legend_above(figure)
    return figure


def bands(report: Report) -> Figure | None:
    """Draw the predicted time of a model's call against its memory, and what was measured of it and of torch."""
    rows = report.rows
    banded = [row for row in rows.to_dict("records") if isinstance(row.get("front"), list)]
    if not banded:
        return None
    figure, panel = panels(len(banded), 3.2)
    for axes, row in zip(panel, banded, strict=True):
        sizes, times = np.array(row["front"]).T
        axes.step(sizes / _MIB, times * 1e3, where="post", color=SERIES[0], label="in bands, predicted")
        torchs = rows[(rows["turns"] == row["turns"]) & (rows["contestant"] == TORCH)].to_dict("records")
        for one, colour, name in zip((row, *torchs), (SERIES[0], TORCH_COLOUR), ("in bands", "PyTorch"), strict=False):
            style: dict[str, Any] = {"color": colour, "markersize": 4, "label": f"{name}, measured"}
            axes.plot(one["peak_bytes"] / _MIB, one["time_s"] * 1e3, "s", **style)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        label(axes, plain(f"{row['network']}, {row['contestant']}"), "activations and workspace, MiB", "ms per call")
    legend_above(figure)
    return figure


_DRAW: Mapping[str, Callable[[Report], Figure | None]] = {
    "speedups": speedups,
    "divided": divided,
    "limits": limits,
    "desirable": desirable,
    "micro-batches": micro_batches,
    "bands": bands,
}
