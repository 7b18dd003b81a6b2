"""Reports headroom, the workspace that each convolution of a training step can use without raising the peak memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from mucudnn.bench.report.plots import ALARM_COLOUR, OTHER_COLOUR, OURS_COLOUR, TORCH_COLOUR, label, new_figure
from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import milliseconds, new_table, ratio, short_name
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.tracing.headroom import Headroom
from mucudnn.tracing.training_step import ConvolutionCall
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TIMES = ("torch_s", "mucudnn_s")


def headroom_rows(headroom: Headroom, tuning: TableTuning) -> list[Record]:
    """Return a row for each operation of each convolution call, in the order in which a training step runs them.

    ``limit_bytes``: bytes that are free for a workspace. ``configuration``, ``torch_s`` and ``mucudnn_s`` are None for
    operations that were not tuned. ``workspace_bytes`` is capped at the limit: torch's own workspace fits below the
    peak by definition, but was measured with a bias, which can add a few bytes.
    """
    chosen = {
        _key(name, row.tuned.problem, row.tuned.batch_size): row.tuned for row in tuning.rows for name in row.names
    }
    found = (chosen.get(_key(call.name, call.problem, call.batch_size)) for call in headroom.timeline.calls)
    return [
        _row(call, headroom.limits[call.name, call.operation], tuned)
        for call, tuned in zip(headroom.timeline.calls, found, strict=True)
    ]


def _key(name: str, problem: ConvProblem, batch_size: int) -> tuple[str, Operation, tuple[int, ...]]:
    """Return a key that identifies a call: name of its module, operation and shape of x.

    The geometry is not needed, because each module has only one.
    """
    return name, problem.operation, problem.x_shape(batch_size)


def _row(call: ConvolutionCall, limit_bytes: int, tuned: TunedProblem | None) -> Record:
    needed_bytes = 0 if tuned is None else tuned.configuration.workspace_bytes
    return {
        "layer": call.name,
        "operation": str(call.operation),
        "batch_size": call.batch_size,
        "event": call.event,
        "in_use_bytes": call.in_use_bytes,
        "limit_bytes": limit_bytes,
        "workspace_bytes": min(needed_bytes, limit_bytes),
        "configuration": None if tuned is None else str(tuned.configuration),
        "torch_s": None if tuned is None else tuned.baseline_s,
        "mucudnn_s": None if tuned is None else tuned.time_s,
    }


def headroom_table(headroom: Headroom, tuning: TableTuning, rows: Sequence[Record]) -> Table:
    """Return a table of the bytes in use at each call, the bytes free below the peak, and the configuration chosen."""
    totals = (_milliseconds(_total_s(rows, name)) for name in _TIMES)
    printed = new_table(
        f"{tuning.source}: one training step, peak {format_bytes(headroom.peak_bytes)}",
        ("layer", "operation", "configuration"),
        ("in use", "free below the peak", "workspace", "PyTorch ms", "chosen ms"),
        footer=("total", "", "", "", "", "", *totals),
    )
    for row in rows:
        sizes = (format_bytes(row[name]) for name in ("in_use_bytes", "limit_bytes", "workspace_bytes"))
        times = (_milliseconds(row[name]) for name in _TIMES)
        printed.add_row(short_name((row["layer"],)), row["operation"], row["configuration"], *sizes, *times)
    return printed


def _milliseconds(time_s: float | None) -> str:
    return "" if time_s is None else milliseconds(time_s)


def _total_s(rows: Sequence[Record], name: str) -> float | None:
    """Return the sum of a time over the tuned operations, or None if one of them is unknown."""
    known = [row[name] for row in rows if row["configuration"] is not None]
    return None if None in known else sum(known)


def in_words(headroom: Headroom, rows: Sequence[Record]) -> str:
    """Describe the speedup at the same peak memory, the workspaces, and how the training step was traced."""
    timeline = headroom.timeline
    largest = max((row["workspace_bytes"] for row in rows), default=0)
    fullest = max((row["in_use_bytes"] + row["workspace_bytes"] for row in rows), default=0)
    traced = "without running it" if timeline.real_because is None else f"by running it ({timeline.real_because})"
    return (
        f"{_gain(rows)}within PyTorch's own peak, {format_bytes(headroom.peak_bytes)}: at most "
        f"{format_bytes(fullest)} are in use at a convolution, including workspaces of up to {format_bytes(largest)}\n"
        f"parameters, buffers and input take {format_bytes(timeline.base_bytes)}; the step was traced {traced}"
    )


def headroom_record(headroom: Headroom, tuning: TableTuning, rows: Sequence[Record]) -> Record:
    """Return the JSON object that ``mucudnn explain --headroom --json`` writes."""
    return {
        **record_header(tuning.config, tuning.environment),
        "source": tuning.source,
        "peak_bytes": headroom.peak_bytes,
        "calls": rows,
        "timeline": headroom.timeline.to_json(),
    }


def _gain(rows: Sequence[Record]) -> str:
    """Return a phrase on the speedup of all convolutions, or an empty string if one of torch's times is unknown."""
    torch_s, chosen_s = (_total_s(rows, name) for name in _TIMES)
    if not torch_s or not chosen_s:
        return ""
    times = f"{format_seconds(chosen_s)} instead of {format_seconds(torch_s)}"
    return f"all convolutions in {times}, {ratio(torch_s / chosen_s)} as fast, "


_MIB = 2**20
_BAR = 0.9  # width of a bar, in units of one operator
_ROOM = 1.32  # height of the axes, relative to the peak, which leaves room for names above it
_MOST_NAMES = 80  # the most names that fit side by side
_MOST_LETTERS = 22


def draw_headroom(headroom: Headroom, source: str, rows: Sequence[Record]) -> Figure:
    """Draw the bytes in use after each operator, and on top, at each convolution, its workspace and the free bytes."""
    events = len(headroom.timeline.events)
    peak = headroom.peak_bytes / _MIB
    figure = new_figure(14, 6.5, f"{source}: the memory of one training step")
    axes = figure.subplots()
    live = [event.live_bytes / _MIB for event in headroom.timeline.events]
    axes.fill_between(range(events), live, step="mid", color=TORCH_COLOUR, alpha=0.35, linewidth=0, label="in use")
    _draw_calls(axes, rows)
    peak_label = f"peak of PyTorch's own step, {format_bytes(headroom.peak_bytes)}"
    axes.axhline(peak, color=ALARM_COLOUR, linestyle="--", linewidth=1.2, label=peak_label)
    for event, name in _names(rows, events):
        axes.text(event, 1.02 * peak, name, rotation=90, fontsize=7, ha="center", va="bottom")
    axes.set_ylim(0, _ROOM * peak)
    axes.set_xlim(-events / _MOST_NAMES - 0.5, events - 0.5)
    axes.legend(loc="lower right", framealpha=1)
    label(axes, _passes(rows), "operators in the order in which they run", "MiB")
    return figure


def _draw_calls(axes: Axes, rows: Sequence[Record]) -> None:
    """Draw a bar for each call. The calls for dx and dw of one torch operator share its place, side by side."""
    sharing = Counter(row["event"] for row in rows)
    drawn: Counter[int] = Counter()
    places, widths = [], []
    for event in (row["event"] for row in rows):
        width = _BAR / sharing[event]
        places.append(event - _BAR / 2 + width * (drawn[event] + 0.5))
        widths.append(width)
        drawn[event] += 1
    in_use = [row["in_use_bytes"] / _MIB for row in rows]
    free = [row["limit_bytes"] / _MIB for row in rows]
    workspaces = [row["workspace_bytes"] / _MIB for row in rows]
    axes.bar(places, free, widths, bottom=in_use, color=OTHER_COLOUR, alpha=0.4, label="free for a workspace")
    axes.bar(places, workspaces, widths, bottom=in_use, color=OURS_COLOUR, label="workspace that is used")


def _names(rows: Sequence[Record], events: int) -> Iterator[tuple[int, str]]:
    """Yield position and name of the convolutions to label, leaving out names that would overlap."""
    free_from = 0.0
    for event, name in {row["event"]: row["layer"] for row in rows}.items():
        if event >= free_from:
            shown = short_name((name,))
            yield event, shown if len(shown) <= _MOST_LETTERS else f"…{shown[1 - _MOST_LETTERS :]}"
            free_from = event + events / _MOST_NAMES


def _passes(rows: Sequence[Record]) -> str:
    """Return a title that marks the start of the backward pass."""
    backward = [row["event"] for row in rows if row["operation"] != Operation.FORWARD]
    return f"forward pass; convolutions of the backward pass from operator {min(backward)} on" if backward else ""
