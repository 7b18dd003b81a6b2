"""The memory of a training step, drawn with the workspaces that fit below its peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mucudnn.bench.headroom_report import HeadroomRow
from mucudnn.bench.plots import ALARM_COLOUR, OTHER_COLOUR, OURS_COLOUR, TORCH_COLOUR, label, new_figure
from mucudnn.headroom import Headroom
from mucudnn.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = 2**20


def draw_headroom(headroom: Headroom, source: str, rows: Sequence[HeadroomRow]) -> Figure:
    """Bytes in use after each operator; on top, at each convolution, its workspace and what would have been free."""
    timeline = headroom.timeline
    figure = new_figure(14, 6.5, f"{source}: the memory of one training step")
    axes = figure.subplots()
    live = [event.live_bytes / _MIB for event in timeline.events]
    axes.fill_between(range(len(live)), live, step="mid", color=TORCH_COLOUR, alpha=0.35, label="in use")
    where = [row.call.event for row in rows]
    in_use = [row.call.in_use_bytes / _MIB for row in rows]
    free = [row.limit_bytes / _MIB for row in rows]
    workspaces = [row.workspace_bytes / _MIB for row in rows]
    axes.bar(where, free, bottom=in_use, width=0.9, color=OTHER_COLOUR, alpha=0.3, label="free for a workspace")
    axes.bar(where, workspaces, bottom=in_use, width=0.9, color=OURS_COLOUR, label="workspace that is used")
    peak = headroom.peak_bytes / _MIB
    peak_label = f"peak of torch's own step, {format_bytes(headroom.peak_bytes)}"
    axes.axhline(peak, color=ALARM_COLOUR, linestyle="--", linewidth=1.2, label=peak_label)
    axes.set_ylim(0, 1.15 * peak)
    axes.set_xlim(-0.5, max(len(live) - 0.5, 0.5))
    axes.legend(loc="lower right")
    label(axes, "forward pass, then backward pass", "operators in the order in which they run", "MiB")
    return figure
