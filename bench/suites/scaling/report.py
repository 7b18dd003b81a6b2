"""The table of predicted data-parallel training, and the batch below which a device starves."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from mucudnn.bench.results.text_tables import milliseconds, new_table, ratio
from mucudnn.bench.results.variants import shown_name
from mucudnn.bench.suites.scaling.prediction import ENOUGH, Device, Point
from mucudnn.bench.suites.scaling.steps import Convolutions
from mucudnn.core.values import format_bytes

_FAR = "~"


def scale_table(title: str, points: Sequence[Point]) -> Table:
    """Return a table with a row for each number of ranks, first under strong, then under weak scaling."""
    printed = new_table(
        title,
        ("scaling",),
        (
            *("ranks", "local batch", "PyTorch ms", "mucudnn ms", "speedup", "mucudnn samples/s"),
            *("efficiency", "waits", "best bucket_cap_mb", "waits then"),
        ),
    )
    torchs = {(point.scaling, point.ranks): point for point in points if point.convolutions is Convolutions.TORCH}
    for point in points:
        if point.convolutions is Convolutions.MUCUDNN:
            torch_s, others = torchs[point.scaling, point.ranks].step_s, point.ranks > 1
            best_s = point.compute_s + point.best_cap_exposed_s
            printed.add_row(
                str(point.scaling),
                str(point.ranks),
                f"{_FAR if point.is_extrapolated else ''}{point.local_batch}",
                milliseconds(torch_s),
                milliseconds(point.step_s),
                ratio(torch_s / point.step_s),
                f"{point.throughput:.4g}",
                f"{point.efficiency:.0%}",
                f"{point.exposed_s / point.step_s:.0%}" if others else "",
                f"{point.best_bucket_cap_mb:.3g}" if others else "",
                f"{point.best_cap_exposed_s / best_s:.0%}" if others else "",
            )
    printed.caption = (
        f"{_FAR}: extrapolated beyond the largest measured batch; waits: share of mucudnn's step in communication that "
        "the backward pass does not hide, with DistributedDataParallel's default buckets and with the best ones"
    )
    return printed


def in_words(device: Device) -> str:
    """Describe the steps that were measured, and the local batches that are too small for the device."""
    measured = {which: device.measured(which) for which in Convolutions}
    steps = "; ".join(
        f"{n} samples {milliseconds(torch_s)} and {milliseconds(measured[Convolutions.MUCUDNN][n])} ms"
        for n, torch_s in measured[Convolutions.TORCH].items()
    )
    starving = "; ".join(f"{shown_name(which)} {device.starving_below(which)}" for which in Convolutions)
    return (
        f"measured in turns, PyTorch's step and mucudnn's: {steps}\n"
        f"the device starves, under {ENOUGH:.0%} of its best throughput, below a local batch of: {starving}\n"
        f"all-reduced in a step: {format_bytes(sum(device.steps.gradients))} in {len(device.steps.gradients)} gradients"
    )
