"""Reports on how time and workspace depend on the batch size: tables and a figure for people, CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

from rich.table import Table

from mucudnn.bench.analyses.batch_sizes import ENOUGH, BatchSweep, Curves
from mucudnn.bench.analyses.cliffs import LEAST_MARGIN, Cliff, CliffKind, Curve, Point
from mucudnn.bench.report.plots import (
    ALARM_COLOUR,
    OTHER_COLOUR,
    OURS_COLOUR,
    TORCH_COLOUR,
    batch_axis,
    label,
    new_figure,
    ratio_axis,
)
from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import long_name, memory_bound, milliseconds, new_table, ratio, short_name
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARK = "▲"
_TIME_CLIFFS = (CliffKind.SLOWER,)
_WORKSPACE_CLIFFS = (CliffKind.MORE_WORKSPACE, CliffKind.DOES_NOT_FIT)


def curves_table(sweep: BatchSweep, curves: Curves, *, every_size: bool = False) -> Table:
    """Return a table of time and workspace per sample by batch size.

    every_size: whether the table has a row for each batch size from 1, instead of only the measured ones.
    """
    columns = ["batch", *(f"{curve.label} ms" for curve in Curve), "PyTorch / divided"]
    columns += [f"{curve.label} workspace" for curve in Curve]
    what = f"{sweep.source}, {name_of(curves)}, per sample, {memory_bound(sweep.config)}"
    printed = new_table(what, (), columns)
    printed.add_column("divided runs as")
    measured = {n for curve in (Curve.TORCH, Curve.UNDIVIDED) for n in curves.points[curve]}
    for n in range(1, sweep.up_to + 1) if every_size else sorted({*sweep.measured_sizes, *measured}):
        printed.add_row(*_size_cells(curves, n))
    return printed


def cliffs_table(sweep: BatchSweep, *, every_cliff: bool = False) -> Table:
    """Return a table of cliffs (batch sizes that are worse than smaller ones) and the divisions that avoid them.

    every_cliff: whether each cliff gets a row; otherwise cliffs of one kind on one curve share the largest one's row.
    """
    printed = new_table(f"cliffs {_MARK}", ("layer", "operation", "curve", "batch", "cliff", "cut"), ())
    for curves in sweep.distinct_curves:
        for (batch, finding, remedy), of_curves in _merged(curves.cliffs, every_cliff).items():
            names = (short_name(curves.names), str(curves.operation or ""), ", ".join(of_curves))
            printed.add_row(*names, batch, finding, remedy)
    if not printed.rows:
        printed.add_row("none")
    return printed


def explanation(sweep: BatchSweep) -> str:
    """Return notes on the tables: what is measured, what is predicted, and batches too small for the device."""
    sizes = ", ".join(map(str, sweep.measured_sizes))
    lines = [
        f"PyTorch, undivided: measured, as one micro-batch of {sizes} samples of a mini-batch of {sweep.up_to}; "
        f"±: noise above {LEAST_MARGIN:.0%}, of a single sample 50 %",
        "divided: solved for every batch size from these measurements; times are predicted, as sums of the parts",
    ]
    below = ", ".join(f"{curve.label} {n}" for curve, n in sweep.starving_below.items())
    lines.append(f"all convolutions: under {ENOUGH:.0%} of their best throughput below a batch of: {below}")
    if sweep.whole_run_speedup is not None:
        speedup = ratio(sweep.whole_run_speedup)
        lines.append(f"whole runs at {sweep.up_to}: the chosen configurations are {speedup} as fast as PyTorch")
    return "\n".join(lines)


def name_of(curves: Curves) -> str:
    """Return the name of the curves' layer and operation, such as ``conv1 forward``, or ``all convolutions``."""
    return "all convolutions" if curves.operation is None else f"{short_name(curves.names)} {curves.operation}"


def sweep_record(sweep: BatchSweep) -> Record:
    """Return the JSON object of ``mucudnn batch --json``: points and cliffs of the network and of every problem."""
    return {
        **record_header(sweep.config, sweep.environment),
        "source": sweep.source,
        "up_to": sweep.up_to,
        "measured_sizes": sweep.measured_sizes,
        "whole_run_speedup": sweep.whole_run_speedup,
        "starving_below": sweep.starving_below,
        "network": _curves_record(sweep.network),
        "problems": [_curves_record(curves) for curves in sweep.problems],
    }


def sweep_rows(sweep: BatchSweep) -> list[Record]:
    """Return the rows of the CSV file, one for each point of each curve, the network first."""
    return [row for curves in sweep.all_curves for row in _csv_rows(curves)]


def _size_cells(curves: Curves, n: int) -> Iterator[str]:
    yield str(n)
    for curve in Curve:
        point = curves.at(curve, n)
        yield "" if point is None else _time_cell(point) + _mark(curves, curve, n, _TIME_CLIFFS)
    torch, divided = curves.at(Curve.TORCH, n), curves.at(Curve.DIVIDED, n)
    yield "" if torch is None or divided is None else ratio(torch.time_s / divided.time_s)
    for curve in Curve:
        point = curves.at(curve, n)
        yield "" if point is None else _workspace_cell(point) + _mark(curves, curve, n, _WORKSPACE_CLIFFS)
    yield "" if divided is None else divided.runs_as


def _time_cell(point: Point) -> str:
    noise = f" ±{point.uncertainty:.0%}" if point.uncertainty > LEAST_MARGIN else ""
    return milliseconds(point.time_per_sample_s) + noise


def _workspace_cell(point: Point) -> str:
    return format_bytes(round(point.workspace_per_sample_bytes))


def _mark(curves: Curves, curve: Curve, n: int, kinds: Collection[CliffKind]) -> str:
    marked = any(cliff.curve is curve and cliff.n == n and cliff.kind in kinds for cliff in curves.cliffs)
    return f" {_MARK}" if marked else ""


def _merged(cliffs: Collection[Cliff], every_cliff: bool) -> dict[tuple[str, str, str], list[str]]:
    """Group equal cliffs: map their table cells (batch sizes, finding, remedy) to the names of their curves."""
    groups: dict[tuple[object, ...], list[Cliff]] = {}
    for cliff in cliffs:
        groups.setdefault((cliff.curve, cliff.kind, cliff.n if every_cliff else 0), []).append(cliff)
    merged: dict[tuple[str, str, str], list[str]] = {}
    for *others, shown in groups.values():
        batch = f"{shown.n}, also {', '.join(str(cliff.n) for cliff in others)}" if others else str(shown.n)
        merged.setdefault((batch, shown.finding, shown.remedy), []).append(shown.curve.label)
    return merged


def _curves_record(curves: Curves) -> Record:
    return {
        "layer": long_name(curves.names),
        "operation": curves.operation,
        "count": curves.count,
        **{str(curve): [_point_record(point) for point in curves.points[curve].values()] for curve in Curve},
        "cliffs": [_cliff_record(cliff) for cliff in curves.cliffs],
    }


def _point_record(point: Point) -> Record:
    names = ("runs_as", "time_s", "time_per_sample_s", "workspace_bytes", "workspace_per_sample_bytes", "fits")
    return {"batch_size": point.n, **{name: getattr(point, name) for name in (*names, "uncertainty")}}


def _cliff_record(cliff: Cliff) -> Record:
    return {
        "curve": cliff.curve,
        "kind": cliff.kind,
        "batch_size": cliff.n,
        "reference_batch_size": cliff.reference.n,
        "cut": None if cliff.cut is None else _point_record(cliff.cut),
        "removed": cliff.removed,
        "refuted": cliff.refuted,
        "speedup": cliff.speedup,
        "in_words": str(cliff),
    }


def _csv_rows(curves: Curves) -> Iterator[Record]:
    for curve in Curve:
        for point in curves.points[curve].values():
            cliffs = [str(cliff) for cliff in curves.cliffs if cliff.curve is curve and cliff.n == point.n]
            yield {
                "layer": long_name(curves.names),
                "operation": curves.operation or "all",
                "count": curves.count,
                "curve": curve,
                "origin": "solved" if curve is Curve.DIVIDED else "measured",
                **_point_record(point),
                "cliffs": "; ".join(cliffs),
            }


_STYLES: Mapping[Curve, Mapping[str, Any]] = {
    Curve.TORCH: {"color": TORCH_COLOUR, "marker": "o", "label": "PyTorch, undivided (measured)"},
    Curve.UNDIVIDED: {"color": OTHER_COLOUR, "marker": "s", "label": "best algorithm, undivided (measured)"},
    Curve.DIVIDED: {"color": OURS_COLOUR, "label": "divided (solved)"},
}


_MOST_PROBLEMS, _MOST_NOTES = 3, 7
_NOTE_COLUMNS = 46  # number of characters per line of notes


def draw_sweep(sweep: BatchSweep) -> Figure:
    """Draw time and workspace per sample by batch size, for the network and the problems that gain most.

    Cliffs, which are batch sizes that are worse than smaller ones, are circled and numbered. Notes next to the plots
    name the divisions into parts that remove them.
    """
    shown = _shown(sweep)
    title = f"{sweep.source} up to batch {sweep.up_to}, {memory_bound(sweep.config)}"
    figure = new_figure(14, 1 + 3 * len(shown), title)
    grid = figure.add_gridspec(len(shown), 3, width_ratios=(1, 1, 0.8))
    for row, curves in enumerate(shown):
        time, workspace, notes = (figure.add_subplot(grid[row, column]) for column in range(3))
        _draw_curves(time, curves, lambda point: point.time_per_sample_s * 1e3)
        _draw_curves(workspace, curves, lambda point: point.workspace_per_sample_bytes / 2**20)
        ratio_axis(time)
        workspace.set_ylim(bottom=0)
        _draw_limit(workspace, sweep)
        label(time, f"{name_of(curves)}: time", "batch size", "ms per sample")
        label(workspace, f"{name_of(curves)}: workspace", "batch size", "MiB per sample")
        batch_axis(time, sweep.up_to)
        batch_axis(workspace, sweep.up_to)
        _mark_cliffs(time, workspace, notes, curves.cliffs)
    handles, labels = figure.axes[1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
    return figure


def _shown(sweep: BatchSweep) -> list[Curves]:
    """Return the curves to draw: those of the network and of the problems with the most expensive cliffs."""
    first, *others = sweep.distinct_curves
    ranked = sorted((curves for curves in others if curves.cliffs), key=_saved_s, reverse=True)
    return [first, *ranked[:_MOST_PROBLEMS]]


def _saved_s(curves: Curves) -> float:
    """Return the largest saving in seconds per sample from dividing a batch at one of the cliffs; 0 without cliffs."""
    saved = [c.point.time_per_sample_s - c.cut.time_per_sample_s for c in curves.cliffs if c.cut is not None]
    return curves.count * max(saved, default=0.0)


def _draw_curves(axes: Axes, curves: Curves, value: Callable[[Point], float]) -> None:
    for curve, style in _STYLES.items():
        points = list(curves.points[curve].values())
        axes.plot([point.n for point in points], [value(point) for point in points], **style)


def _draw_limit(axes: Axes, sweep: BatchSweep) -> None:
    """Draw the workspace limit per sample, which decreases with the batch size."""
    limit = sweep.config.workspace_limit_bytes
    if limit is not None:
        top = axes.get_ylim()[1]
        sizes = range(1, sweep.up_to + 1)
        shares = [limit / n / 2**20 for n in sizes]
        axes.plot(sizes, shares, color=ALARM_COLOUR, linestyle=":", linewidth=1, label="workspace limit")
        axes.set_ylim(0, top)


def _mark_cliffs(time: Axes, workspace: Axes, notes: Axes, cliffs: Sequence[Cliff]) -> None:
    """Circle and number the cliffs in both plots, and write the numbered notes; equal notes share a number."""
    numbers: dict[str, int] = {}
    for cliff in sorted(cliffs, key=lambda cliff: cliff.n):
        number = numbers.setdefault(str(cliff), len(numbers) + 1)
        if cliff.kind is CliffKind.SLOWER:
            _ring(time, number, cliff.n, cliff.point.time_per_sample_s * 1e3)
        else:
            _ring(workspace, number, cliff.n, cliff.point.workspace_per_sample_bytes / 2**20)
    texts = (f"({number}) {words}" for words, number in numbers.items())
    lines = [fill(text, _NOTE_COLUMNS, subsequent_indent="      ") for text in texts]
    if len(lines) > _MOST_NOTES:
        lines[_MOST_NOTES:] = [f"and {len(lines) - _MOST_NOTES} more"]
    notes.set_axis_off()
    notes.text(0, 1, "\n".join(lines or ["no cliffs"]), va="top", fontsize=8, linespacing=1.25)


def _ring(axes: Axes, number: int, x: float, y: float) -> None:
    axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", markeredgecolor=ALARM_COLOUR, markeredgewidth=1.4)
    axes.annotate(str(number), (x, y), (6, 6), textcoords="offset points", color=ALARM_COLOUR, fontsize=9)
