"""Tables of data-parallel training, made from a result folder: a row for each kind of step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.table import Table

from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.report.tables import bound_in_words, milliseconds, new_table, ratio, spread

Step = Mapping[str, Any]  # a row of the folder, with ``time_s``, ``noise`` and ``speedup``

_COLUMNS: Mapping[str, Callable[[Step], str]] = {
    "step ms": lambda step: milliseconds(step["time_s"]),
    "IQR / median": lambda step: f"{step['noise']:.1%}",
    "speedup": lambda step: ratio(step["speedup"]),
    "samples/s": lambda step: f"{step['ranks'] * step['batch_size'] / step['time_s']:.1f}",
    "convolutions ms": lambda step: milliseconds(step["forward_convolutions_s"] + step["backward_convolutions_s"]),
    "other compute ms": lambda step: milliseconds(step["rest_s"]),
    "exposed ms": lambda step: milliseconds(step["exposed_s"]),
    "buckets": lambda step: str(len(step["bucket_bytes"])),
    "ranks equal": lambda step: f"{step['equal']} of {step['compared']}",
}


def data_parallel_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a row for each bucket size and kind of convolutions; speedups are to torch's with the same buckets."""
    settings = folder.header.settings
    title = (
        f"{folder.header.source}, {settings['ranks']} ranks of {settings['batch_size']} samples, "
        f"{settings['communication']}: data-parallel steps, {bound_in_words(settings)}"
    )
    printed = new_table(title, ("bucket_cap_mb", "convolutions"), [*_COLUMNS])
    steps = [{**line, **spread(line["samples_s"])} for line in folder.lines]
    torchs_s = {step["bucket_cap_mb"]: step["time_s"] for step in steps if step["contestant"] == TORCH}
    for step in steps:
        cap = step["bucket_cap_mb"]
        told = {**step, "speedup": torchs_s[cap] / step["time_s"]}
        name = "default" if cap is None else f"{cap:g}"
        printed.add_row(name, step["contestant"], *(shown(told) for shown in _COLUMNS.values()))
    printed.caption = (
        "convolutions (timed in place), other compute: of steps without communication; exposed: what a step takes "
        "longer with it"
    )
    yield printed
    yield _in_words(folder)


def _in_words(folder: ResultFolder) -> str:
    """Say what the ranks computed with, and after which steps they were compared."""
    settings, environment = folder.header.settings, folder.header.environment
    after = (
        f"after the steps that average the parameters of all ranks, one in {settings['period']}"
        if settings["averages_parameters"]
        else "after each step that is measured, and after the first ones"
    )
    threads = "1 thread" if environment.threads == 1 else f"{environment.threads} threads"
    each = "" if environment.device_type == "cuda" else f", {threads} each"
    return f"{settings['ranks']} ranks{each}; their parameters were compared bit by bit {after}."
