"""Reports headroom: the workspace that each convolution of a training step can use without raising the peak memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.table import Table

from mucudnn.bench.report.plots import ALARM_COLOUR, OTHER_COLOUR, OURS_COLOUR, TORCH_COLOUR, label, new_figure
from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import milliseconds, new_table, ratio, short_name
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.tracing.headroom import Headroom
from mucudnn.tracing.memory_timeline import ConvolutionCall
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class HeadroomRow:
    """One operation of one call of a module in a training step, with the bytes that are free for its workspace.

    tuned: the configuration chosen for the operation, or None if the operation was not tuned.
    """

    call: ConvolutionCall
    limit_bytes: int
    tuned: TunedProblem | None

    @property
    def workspace_bytes(self) -> int:
        """Workspace of the chosen configuration, at most the free bytes; 0 if none was chosen.

        It is capped since torch's own workspace fits below the peak by definition, but was measured with a bias, which
        can add a few bytes.
        """
        return 0 if self.tuned is None else min(self.tuned.configuration.workspace_bytes, self.limit_bytes)


def headroom_rows(headroom: Headroom, tuning: TableTuning) -> list[HeadroomRow]:
    """Return a row for each convolution call, in the order in which a training step makes the calls."""
    chosen = {
        _key(name, row.tuned.problem, row.tuned.batch_size): row.tuned for row in tuning.rows for name in row.names
    }
    return [
        HeadroomRow(
            call,
            headroom.limits[call.name, call.operation],
            chosen.get(_key(call.name, call.problem, call.batch_size)),
        )
        for call in headroom.timeline.calls
    ]


def headroom_table(headroom: Headroom, tuning: TableTuning, rows: Sequence[HeadroomRow]) -> Table:
    """Return a table of bytes in use at each call, bytes free below the peak, and the configuration chosen."""
    printed = new_table(
        f"{tuning.source}: one training step, peak {format_bytes(headroom.peak_bytes)}",
        ("layer", "operation", "configuration"),
        ("in use", "free below the peak", "workspace", "PyTorch ms", "chosen ms"),
        footer=("total", "", "", "", "", "", *(_total(rows, name) for name in ("baseline_s", "time_s"))),
    )
    for row in rows:
        printed.add_row(*_cells(row))
    return printed


def in_words(headroom: Headroom, rows: Sequence[HeadroomRow]) -> str:
    """Return a text on the speedup at the same peak memory, the workspaces, and how the training step was traced."""
    timeline = headroom.timeline
    largest = max((row.workspace_bytes for row in rows), default=0)
    fullest = max((row.call.in_use_bytes + row.workspace_bytes for row in rows), default=0)
    traced = "without running it" if timeline.real_because is None else f"by running it ({timeline.real_because})"
    return (
        f"{_gain(rows)}within PyTorch's own peak, {format_bytes(headroom.peak_bytes)}: at most "
        f"{format_bytes(fullest)} are in use at a convolution, including workspaces of up to {format_bytes(largest)}\n"
        f"parameters, buffers and input take {format_bytes(timeline.base_bytes)}; the step was traced {traced}"
    )


def headroom_record(headroom: Headroom, tuning: TableTuning, rows: Sequence[HeadroomRow]) -> Record:
    """Return the JSON object that ``mucudnn explain --headroom --json`` writes."""
    return {
        **record_header(tuning.config, tuning.environment, datetime.now(UTC)),
        "source": tuning.source,
        "peak_bytes": headroom.peak_bytes,
        "calls": [_record(row) for row in rows],
        "timeline": headroom.timeline.to_json(),
    }


def headroom_csv_rows(rows: Sequence[HeadroomRow]) -> list[Record]:
    """Return the rows of the CSV file, one for each convolution call of the training step."""
    return [_record(row) for row in rows]


def _key(name: str, problem: ConvProblem, batch_size: int) -> tuple[str, Operation, tuple[int, ...]]:
    """Return a key that identifies a call: name of its module, operation and shape of x.

    The geometry is not needed, since a module has only one.
    """
    return name, problem.operation, problem.x_shape(batch_size)


def _gain(rows: Sequence[HeadroomRow]) -> str:
    """Return a phrase on the speedup of all convolutions, or an empty string if torch's time of one is unknown."""
    tuned = [row.tuned for row in rows if row.tuned is not None]
    known = [one.baseline_s for one in tuned if one.baseline_s is not None]
    if not tuned or len(known) < len(tuned):
        return ""
    torch_s, chosen_s = sum(known), sum(one.time_s for one in tuned)
    times = f"{format_seconds(chosen_s)} instead of {format_seconds(torch_s)}"
    return f"all convolutions in {times}, {ratio(torch_s / chosen_s)} as fast, "


def _cells(row: HeadroomRow) -> tuple[str, ...]:
    tuned = row.tuned
    return (
        short_name((row.call.name,)),
        str(row.call.operation),
        "" if tuned is None else str(tuned.configuration),
        format_bytes(row.call.in_use_bytes),
        format_bytes(row.limit_bytes),
        format_bytes(row.workspace_bytes),
        "" if tuned is None or tuned.baseline_s is None else milliseconds(tuned.baseline_s),
        "" if tuned is None else milliseconds(tuned.time_s),
    )


def _total(rows: Sequence[HeadroomRow], name: str) -> str:
    """Return the sum of the time attribute ``name`` over the tuned calls, or an empty string if one time is unknown."""
    known = [getattr(row.tuned, name) for row in rows if row.tuned is not None]
    return "" if None in known else milliseconds(sum(known))


def _record(row: HeadroomRow) -> Record:
    tuned = row.tuned
    return {
        "layer": row.call.name,
        "operation": str(row.call.operation),
        "batch_size": row.call.batch_size,
        "event": row.call.event,
        "in_use_bytes": row.call.in_use_bytes,
        "limit_bytes": row.limit_bytes,
        "workspace_bytes": row.workspace_bytes,
        "configuration": None if tuned is None else str(tuned.configuration),
        "torch_s": None if tuned is None else tuned.baseline_s,
        "mucudnn_s": None if tuned is None else tuned.time_s,
    }


_MIB = 2**20
_BAR = 0.9  # width of a bar, in operators
_ROOM = 1.32  # height of the axes, in peaks, which leaves room for names above the peak
_MOST_NAMES = 80  # side by side
_MOST_LETTERS = 22


def draw_headroom(headroom: Headroom, source: str, rows: Sequence[HeadroomRow]) -> Figure:
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


def _draw_calls(axes: Axes, rows: Sequence[HeadroomRow]) -> None:
    """Draw a bar for each call; the calls for dx and dw of one torch operator stand side by side in its place."""
    sharing = Counter(row.call.event for row in rows)
    drawn: Counter[int] = Counter()
    places, widths = [], []
    for event in (row.call.event for row in rows):
        width = _BAR / sharing[event]
        places.append(event - _BAR / 2 + width * (drawn[event] + 0.5))
        widths.append(width)
        drawn[event] += 1
    in_use = [row.call.in_use_bytes / _MIB for row in rows]
    free = [row.limit_bytes / _MIB for row in rows]
    workspaces = [row.workspace_bytes / _MIB for row in rows]
    axes.bar(places, free, widths, bottom=in_use, color=OTHER_COLOUR, alpha=0.4, label="free for a workspace")
    axes.bar(places, workspaces, widths, bottom=in_use, color=OURS_COLOUR, label="workspace that is used")


def _names(rows: Sequence[HeadroomRow], events: int) -> Iterator[tuple[int, str]]:
    """Yield position and name of the convolutions to label, leaving out names that would overlap."""
    free_from = 0.0
    for event, name in {row.call.event: row.call.name for row in rows}.items():
        if event >= free_from:
            shown = short_name((name,))
            yield event, shown if len(shown) <= _MOST_LETTERS else f"…{shown[1 - _MOST_LETTERS :]}"
            free_from = event + events / _MOST_NAMES


def _passes(rows: Sequence[HeadroomRow]) -> str:
    """Return a title that says where the backward pass begins."""
    backward = [row.call.event for row in rows if row.call.operation is not Operation.FORWARD]
    return f"forward pass; convolutions of the backward pass from operator {min(backward)} on" if backward else ""
