"""Tells a sweep over batch sizes: tables for people, CSV and JSON for programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import UTC, datetime

from rich.table import Table

from mucudnn.bench.analyses.batch_sizes import ENOUGH, BatchSweep, Curves
from mucudnn.bench.analyses.cliffs import LEAST_MARGIN, Cliff, CliffKind, Curve, Point
from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import long_name, memory_bound, milliseconds, new_table, ratio, short_name
from mucudnn.words.units import format_bytes

_MARK = "▲"
_TIME_CLIFFS = (CliffKind.SLOWER,)
_WORKSPACE_CLIFFS = (CliffKind.MORE_WORKSPACE, CliffKind.DOES_NOT_FIT)


def curves_table(sweep: BatchSweep, curves: Curves, *, every_size: bool = False) -> Table:
    """Time and workspace per sample at the measured batch sizes, or at every one."""
    columns = ["batch", *(f"{curve} ms" for curve in Curve), "torch / divided"]
    columns += [f"{curve} workspace" for curve in Curve]
    what = f"{sweep.source}, {name_of(curves)}, per sample, {memory_bound(sweep.config)}"
    printed = new_table(what, (), columns)
    printed.add_column("divided runs as")
    measured = {n for curve in (Curve.TORCH, Curve.UNDIVIDED) for n in curves.points[curve]}
    for n in range(1, sweep.up_to + 1) if every_size else sorted({*sweep.measured_sizes, *measured}):
        printed.add_row(*_size_cells(curves, n))
    return printed


def cliffs_table(sweep: BatchSweep, *, every_cliff: bool = False) -> Table:
    """The cliffs, and the cut that removes each: of every problem and kind the largest batch size, or all of them."""
    printed = new_table(f"cliffs {_MARK}", ("layer", "operation", "curve", "batch", "cliff", "cut"), ())
    for curves in sweep.distinct_curves:
        for (batch, finding, remedy), of_curves in _merged(curves.cliffs, every_cliff).items():
            names = (short_name(curves.names), str(curves.operation or ""), ", ".join(of_curves))
            printed.add_row(*names, batch, finding, remedy)
    if not printed.rows:
        printed.add_row("none")
    return printed


def explanation(sweep: BatchSweep) -> str:
    """Say what is measured, and what is solved."""
    sizes = ", ".join(map(str, sweep.measured_sizes))
    lines = [
        f"torch, undivided: measured, as one micro-batch of {sizes} samples of a mini-batch of {sweep.up_to}; "
        f"±: noise above {LEAST_MARGIN:.0%}, of a single sample 50 %",
        "divided: solved for every batch size from these measurements; times are predicted, the sum of the parts",
    ]
    below = ", ".join(f"{curve} {n}" for curve, n in sweep.starving_below.items())
    lines.append(f"under {ENOUGH:.0%} of their best throughput, all convolutions together, below a batch of: {below}")
    if sweep.whole_run_speedup is not None:
        speedup = ratio(sweep.whole_run_speedup)
        lines.append(f"whole runs at {sweep.up_to}: what tuning chose for each problem is {speedup} as fast as torch")
    return "\n".join(lines)


def name_of(curves: Curves) -> str:
    """Return ``conv1 forward``, or that it is the sum of all."""
    return "all convolutions" if curves.operation is None else f"{short_name(curves.names)} {curves.operation}"


def sweep_record(sweep: BatchSweep) -> Record:
    """Return what ``mucudnn batch --json`` writes: every problem and the network, all points and all cliffs."""
    return {
        **record_header(sweep.config, sweep.environment, datetime.now(UTC)),
        "source": sweep.source,
        "up_to": sweep.up_to,
        "measured_sizes": sweep.measured_sizes,
        "whole_run_speedup": sweep.whole_run_speedup,
        "starving_below": sweep.starving_below,
        "network": _curves_record(sweep.network),
        "problems": [_curves_record(curves) for curves in sweep.problems],
    }


def sweep_rows(sweep: BatchSweep) -> list[Record]:
    """Return the lines of the CSV file: one for each point of each curve, the network first."""
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
    """Group cliffs: (batch size with those that it stands for, finding, remedy) -> the curves that have it."""
    groups: dict[tuple[object, ...], list[Cliff]] = {}
    for cliff in cliffs:
        groups.setdefault((cliff.curve, cliff.kind, cliff.n if every_cliff else 0), []).append(cliff)
    merged: dict[tuple[str, str, str], list[str]] = {}
    for *others, shown in groups.values():
        batch = f"{shown.n}, also {', '.join(str(cliff.n) for cliff in others)}" if others else str(shown.n)
        merged.setdefault((batch, shown.finding, shown.remedy), []).append(str(shown.curve))
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
    return {
        "batch_size": point.n,
        "runs_as": point.runs_as,
        "time_s": point.time_s,
        "time_per_sample_s": point.time_per_sample_s,
        "workspace_bytes": point.workspace_bytes,
        "workspace_per_sample_bytes": point.workspace_per_sample_bytes,
        "fits": point.fits,
        "uncertainty": point.uncertainty,
    }


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
