"""Time against memory of a model that runs in bands of rows: the exact front, as predicted from measured operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from mucudnn.bench.report.plots import ALARM_COLOUR, OURS_COLOUR, label, new_figure
from mucudnn.bench.report.records import Record
from mucudnn.bench.report.tables import milliseconds, new_table
from mucudnn.optimizing.memory_budget import Fitted
from mucudnn.solver.plans import Plan
from mucudnn.words.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 2**20
_STEP = 1.03  # plans that need less than this factor more memory than the one before are left out


def band_rows(fitted: Fitted) -> list[Record]:
    """Return a row for each plan of the front that differs in memory from the one before, the least memory first."""
    kept: list[Plan] = []
    for plan in reversed(fitted.front):  # of plans close to each other the fastest
        if not kept or plan.memory_bytes * _STEP <= kept[-1].memory_bytes:
            kept.append(plan)
    return [
        {"memory_bytes": plan.memory_bytes, "predicted_s": plan.time_s, "bands": _bands(plan), "segments": _count(plan)}
        for plan in reversed(kept)
    ]


def _bands(plan: Plan) -> int:
    return max(one.cut.bands for one in plan.segments)


def _count(plan: Plan) -> int:
    return sum(one.cut.bands > 1 for one in plan.segments)


def bands_table(source: str, fitted: Fitted, rows: Sequence[Record]) -> Table:
    """Return a table of the front."""
    printed = new_table(
        f"{source}, memory of a call in bands of rows", ("memory",), ("predicted ms", "segments", "bands")
    )
    for row in rows:
        cells = str(row["segments"] or ""), str(row["bands"] if row["bands"] > 1 else "")
        printed.add_row(format_bytes(row["memory_bytes"]), milliseconds(row["predicted_s"]), *cells)
    printed.caption = "activations and workspace; segments that run in bands, and the most bands of one"
    return printed


def bands_in_words(fitted: Fitted, rows: Sequence[Record]) -> str:
    """Say what the fastest plan takes beside PyTorch, what the least memory costs, and what 100 MiB more save."""
    least, fastest = rows[0], rows[-1]
    words = [
        f"measured without a budget: {format_seconds(fitted.time_s)} in {format_bytes(fitted.needed_bytes)}",
        f"the least, {format_bytes(least['memory_bytes'])}, is predicted to take "
        f"{least['predicted_s'] / fastest['predicted_s']:.2f} times as long as the most",
    ]
    within = [row for row in rows if row["memory_bytes"] <= least["memory_bytes"] + 100 * _MIB]
    if len(within) > 1:
        words.append(
            f"100 MiB more than the least: {1 - within[-1]['predicted_s'] / least['predicted_s']:.0%} less time"
        )
    if fitted.whole_run is not None and fitted.torch_bytes is not None:
        words.insert(1, f"PyTorch: {format_seconds(fitted.whole_run.baseline_s)} in {format_bytes(fitted.torch_bytes)}")
    return "; ".join(words)


def draw_bands(source: str, fitted: Fitted, rows: Sequence[Record]) -> Figure:
    """Draw predicted time against memory, with what was measured of this plan and of PyTorch."""
    figure = new_figure(7, 4, source)
    axes = figure.subplots()
    sizes, times = [row["memory_bytes"] / _MIB for row in rows], [row["predicted_s"] * 1e3 for row in rows]
    axes.step(sizes, times, where="post", color=OURS_COLOUR, label="in bands, predicted")
    axes.plot(fitted.needed_bytes / _MIB, fitted.time_s * 1e3, "s", color=OURS_COLOUR, label="in bands, measured")
    if fitted.whole_run is not None and fitted.torch_bytes is not None:
        point = fitted.torch_bytes / _MIB, fitted.whole_run.baseline_s * 1e3
        axes.plot(*point, "o", color=ALARM_COLOUR, label="PyTorch, measured")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    label(axes, "", "activations and workspace, MiB", "ms per call")
    return figure
