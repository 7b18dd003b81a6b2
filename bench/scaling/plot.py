"""Draws predicted scaling: throughput, efficiency and communication against ranks, throughput against local batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mucudnn.bench.report.plots import ALARM_COLOUR, OURS_COLOUR, TORCH_COLOUR, batch_axis, label, new_figure
from mucudnn.bench.scaling.local_batches import Convolutions
from mucudnn.bench.scaling.prediction import Point, Scaling
from mucudnn.bench.scaling.result import ScaleResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS: Mapping[Convolutions, str] = {Convolutions.TORCH: TORCH_COLOUR, Convolutions.MUCUDNN: OURS_COLOUR}
_LINES: Mapping[Scaling, Mapping[str, Any]] = {
    Scaling.STRONG: {"linestyle": "-", "marker": "o"},
    Scaling.WEAK: {"linestyle": "--", "marker": "s"},
}


def draw_scale(result: ScaleResult) -> Figure:
    """Four plots with torch's and our convolutions, under strong and under weak scaling."""
    batches = f"{result.batch} samples in all, or {result.local_batch} a rank"
    figure = new_figure(13, 8, f"{result.source}: predicted data-parallel training, {batches}")
    throughput, efficiency, communication, local = figure.subplots(2, 2).flat
    most = max(point.ranks for point in result.points)
    for axes, title, y, value in (
        (throughput, "throughput", "samples / s", lambda point: point.throughput),
        (efficiency, "efficiency, of a rank to the fewest ranks", "%", lambda point: 100 * point.efficiency),
        (communication, "share of the step that waits for communication", "%", lambda p: 100 * p.communication),
    ):
        _draw_points(axes, result, value)
        label(axes, title, "ranks", y)
        batch_axis(axes, most)
    throughput.set_yscale("log")
    for axes in (efficiency, communication):
        axes.set_ylim(bottom=0)
    _draw_local(local, result)
    handles, labels = throughput.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
    return figure


def _draw_points(axes: Axes, result: ScaleResult, value: Callable[[Point], float]) -> None:
    for scaling, style in _LINES.items():
        for which, colour in _COLOURS.items():
            points = result.of(scaling, which)
            x, y = [point.ranks for point in points], [value(point) for point in points]
            axes.plot(x, y, color=colour, markersize=4, label=f"{which}, {scaling} scaling", **style)


def _draw_local(axes: Axes, result: ScaleResult) -> None:
    """Throughput of one rank alone, and where it starves."""
    samples = np.arange(1, result.device.convolutions.largest + 1)
    for which, colour in _COLOURS.items():
        axes.plot(samples, samples / result.device.compute_s(which)[1:], color=colour)
        starving = result.device.starving_below(which)
        line = ":" if which is Convolutions.TORCH else "-."
        axes.axvline(starving, color=ALARM_COLOUR, linestyle=line, linewidth=1, label=f"{which} starves below")
    label(axes, "one rank alone", "local batch", "samples / s")
    batch_axis(axes, result.device.convolutions.largest)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
