"""The memory of a training step, drawn with the workspaces that fit below its peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mucudnn.bench.analyses.headroom_report import HeadroomRow
from mucudnn.bench.report.plots import ALARM_COLOUR, OTHER_COLOUR, OURS_COLOUR, TORCH_COLOUR, label, new_figure
from mucudnn.bench.report.tables import short_name
from mucudnn.tracing.headroom import Headroom
from mucudnn.words.problem import Operation
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 2**20
_BAR = 0.9  # of the width of an operator
_ROOM = 1.32  # height of the axes, in peaks: above the peak stand the names
_MOST_NAMES = 80  # side by side
_MOST_LETTERS = 22


def draw_headroom(headroom: Headroom, source: str, rows: Sequence[HeadroomRow]) -> Figure:
    """Bytes in use after each operator; on top, at each convolution, its workspace and what would have been free."""
    events = len(headroom.timeline.events)
    peak = headroom.peak_bytes / _MIB
    figure = new_figure(14, 6.5, f"{source}: the memory of one training step")
    axes = figure.subplots()
    live = [event.live_bytes / _MIB for event in headroom.timeline.events]
    axes.fill_between(range(events), live, step="mid", color=TORCH_COLOUR, alpha=0.35, linewidth=0, label="in use")
    _draw_calls(axes, rows)
    peak_label = f"peak of torch's own step, {format_bytes(headroom.peak_bytes)}"
    axes.axhline(peak, color=ALARM_COLOUR, linestyle="--", linewidth=1.2, label=peak_label)
    for event, name in _names(rows, events):
        axes.text(event, 1.02 * peak, name, rotation=90, fontsize=7, ha="center", va="bottom")
    axes.set_ylim(0, _ROOM * peak)
    axes.set_xlim(-events / _MOST_NAMES - 0.5, events - 0.5)
    axes.legend(loc="lower right", framealpha=1)
    label(axes, _passes(rows), "operators in the order in which they run", "MiB")
    return figure


def _draw_calls(axes: Axes, rows: Sequence[HeadroomRow]) -> None:
    """dx and dw of one operator of torch stand side by side in its place."""
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
    """Yield place and name of the convolutions, as far as there is room."""
    free_from = 0.0
    for event, name in {row.call.event: row.call.name for row in rows}.items():
        if event >= free_from:
            shown = short_name((name,))
            yield event, shown if len(shown) <= _MOST_LETTERS else f"…{shown[1 - _MOST_LETTERS :]}"
            free_from = event + events / _MOST_NAMES


def _passes(rows: Sequence[HeadroomRow]) -> str:
    """Say where the backward pass begins, for the title."""
    backward = [row.call.event for row in rows if row.call.operation is not Operation.FORWARD]
    return f"forward pass; convolutions of the backward pass from operator {min(backward)} on" if backward else ""
