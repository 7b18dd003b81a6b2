"""Reports of predicted data-parallel training: tables and a figure for people, CSV and JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from mucudnn.bench.analyses.batch_sizes import ENOUGH
from mucudnn.bench.contests.variants import shown_name
from mucudnn.bench.report.plots import ALARM_COLOUR, OURS_COLOUR, TORCH_COLOUR, batch_axis, label, new_figure
from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import memory_bound, milliseconds, new_table, ratio
from mucudnn.bench.scaling.local_batches import Convolutions
from mucudnn.bench.scaling.prediction import Point, ScaleResult, Scaling
from mucudnn.words.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAR = "~"
_STEPS = (
    *("ranks", "local batch", "PyTorch ms", "mucudnn ms", "speedup", "PyTorch samples/s", "mucudnn samples/s"),
    *(
        "PyTorch efficiency",
        "mucudnn efficiency",
        "PyTorch waits",
        "mucudnn waits",
        "MiB sent",
        "all-reduces ms",
        "least ms",
    ),
)
_BUCKETS = (
    *("ranks", "local batch", "default", "waits ms", "best bucket_cap_mb", "buckets", "waits ms"),
    *("best merging", "waits ms"),
)


def scale_tables(result: ScaleResult) -> Iterator[Table]:
    """Yield printed tables: strong scaling, weak scaling, and gradient buckets for strong scaling with mucudnn."""
    yield _steps_table(result, Scaling.STRONG, f"strong scaling: {result.batch} samples in all")
    yield _steps_table(result, Scaling.WEAK, f"weak scaling: {result.local_batch} samples a rank")
    yield _buckets_table(result)


def in_words(result: ScaleResult) -> str:
    """Describe local batches too small for the device, the measurements, and the link between ranks."""
    device, link = result.device, result.cluster.link
    lines = [
        f"{shown_name(which)}: a device starves below a local batch of {device.starving_below(which)}, where it falls "
        f"under {ENOUGH:.0%} of its best throughput"
        for which in Convolutions
    ]
    measured = ", ".join(map(str, device.convolutions.measured))
    whole = "whole steps" if device.ours is None else "whole steps with either"
    steps = ", ".join(str(step.local_batch) for step in device.steps.steps)
    origin = "measured on the running process group" if result.is_link_measured else "as given"
    hidden = "beside the backward pass" if result.cluster.overlaps else "after the backward pass"
    if device.together is not None:
        alone = zip(device.together.steps, device.steps.steps, strict=True)
        slower = ", ".join(f"{both.step_s / one.step_s:.2f} at {both.local_batch}" for both, one in alone)
        lines.append(f"steps beside the other ranks take {slower} times as long as alone, in predictions too")
    return "\n".join(
        (
            *lines,
            f"PyTorch's convolutions were measured at {measured}, {whole} at {steps} samples; mucudnn's are solved "
            f"from one tuning; {_FAR}: extrapolated beyond the largest measured size",
            f"{result.cluster.all_reduce} all-reduce of {format_bytes(device.steps.size_bytes)} in "
            f"{len(device.steps.gradients)} gradients, {hidden}; latency {format_seconds(link.latency_s)}, bandwidth "
            f"{link.bytes_per_s / 1e9:.3g} GB/s, {origin}",
        )
    )


def scale_record(result: ScaleResult) -> Record:
    """Return the JSON object of ``mucudnn scale --json``; its ``points`` are the rows of the CSV file."""
    device, cluster = result.device, result.cluster
    return {
        **record_header(result.config, result.environment),
        "source": result.source,
        "batch": result.batch,
        "local_batch": result.local_batch,
        "link": {**asdict(cluster.link), "is_measured": result.is_link_measured},
        "all_reduce": cluster.all_reduce.value,
        "overlaps": cluster.overlaps,
        "starving_below": {which.value: device.starving_below(which) for which in Convolutions},
        "gradients": [{"name": name, "size_bytes": size} for name, size in device.steps.gradients],
        "steps": [asdict(step) for step in device.steps.steps],
        "steps_ours": None if device.ours is None else [asdict(step) for step in device.ours.steps],
        "steps_together": None if device.together is None else [asdict(step) for step in device.together.steps],
        "measured_sizes": list(device.convolutions.measured),
        "rest_s": device.rest_s.tolist(),
        "convolutions_s": {which.value: times.tolist() for which, times in device.convolutions.times_s.items()},
        "points": scale_rows(result),
    }


def scale_rows(result: ScaleResult) -> list[Record]:
    """Return the CSV rows: by number of ranks, strong or weak scaling, and torch's or mucudnn's convolutions."""
    return [asdict(point) for point in result.points]


def _steps_table(result: ScaleResult, scaling: Scaling, what: str) -> Table:
    printed = new_table(f"{result.source}, {what}, {memory_bound(result.config)}", (), _STEPS)
    for torchs, ours in result.pairs(scaling):
        far = _FAR if ours.is_extrapolated else ""
        printed.add_row(
            str(ours.ranks),
            f"{far}{ours.local_batch}",
            milliseconds(torchs.step_s),
            milliseconds(ours.step_s),
            ratio(torchs.step_s / ours.step_s),
            *(f"{point.throughput:.4g}" for point in (torchs, ours)),
            *(f"{point.efficiency:.0%}" for point in (torchs, ours)),
            *(f"{point.communication:.1%}" for point in (torchs, ours)),
            f"{ours.sent_bytes / 2**20:.4g}",
            milliseconds(ours.all_reduces_s),
            milliseconds(ours.bound_s),
        )
    printed.caption = (
        "waits: share of the step in communication that is not hidden, with the default buckets; sent: by a "
        "rank in a step; least: lower bound of one all-reduce of all gradients"
    )
    return printed


def _buckets_table(result: ScaleResult) -> Table:
    title = (
        f"{result.source}, {result.batch} samples in all: buckets of DistributedDataParallel, mucudnn's convolutions"
    )
    printed = new_table(title, (), _BUCKETS)
    for point in result.of(Scaling.STRONG, Convolutions.MUCUDNN):
        if point.ranks > 1:
            printed.add_row(
                *(str(point.ranks), str(point.local_batch), str(point.default_buckets), milliseconds(point.exposed_s)),
                *(f"{point.best_bucket_cap_mb:.3g}", str(point.best_cap_buckets)),
                *(milliseconds(point.best_cap_exposed_s), str(point.merged_buckets)),
                milliseconds(point.merged_exposed_s),
            )
    printed.caption = "waits: communication that is not hidden; best merging: the optimum, with buckets of any sizes"
    return printed


_COLOURS: Mapping[Convolutions, str] = {Convolutions.TORCH: TORCH_COLOUR, Convolutions.MUCUDNN: OURS_COLOUR}
_LINES: Mapping[Scaling, Mapping[str, Any]] = {
    Scaling.STRONG: {"linestyle": "-", "marker": "o"},
    Scaling.WEAK: {"linestyle": "--", "marker": "s"},
}


def draw_scale(result: ScaleResult) -> Figure:
    """Draw throughput, efficiency and communication by number of ranks, and the throughput of one rank alone.

    Each plot has a curve for torch's convolutions and one for mucudnn's.
    """
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
            axes.plot(x, y, color=colour, markersize=4, label=f"{shown_name(which)}, {scaling} scaling", **style)


def _draw_local(axes: Axes, result: ScaleResult) -> None:
    """Draw the throughput of one rank alone by local batch, and the batch below which its device is underused."""
    samples = np.arange(1, result.device.convolutions.largest + 1)
    for which, colour in _COLOURS.items():
        axes.plot(samples, samples / result.device.compute_s(which)[1:], color=colour)
        starving = result.device.starving_below(which)
        line = ":" if which is Convolutions.TORCH else "-."
        axes.axvline(
            starving, color=ALARM_COLOUR, linestyle=line, linewidth=1, label=f"{shown_name(which)} starves below"
        )
    label(axes, "one rank alone", "local batch", "samples / s")
    batch_axis(axes, result.device.convolutions.largest)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
