"""Tables of the inference benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from mucudnn.bench.results.reading import ResultFolder
from mucudnn.bench.results.text_tables import images_per_s, kinds_table, milliseconds, new_table, ratio, spread
from mucudnn.bench.results.variants import TORCH, Runtime
from mucudnn.core.values import format_bytes

MOST_DIFFERENCE = 1e-3  # Larger relative differences of float32 outputs count as errors, smaller ones as rounding.

_Cell = Mapping[str, Any]  # a row, with ``time_s``, ``noise``, ``speedup`` over torch and ``batch_size``

_COLUMNS: Mapping[str, Callable[[_Cell], str]] = {
    "ms": lambda one: milliseconds(one["time_s"]),
    "images/s": lambda one: images_per_s(one["batch_size"], one["time_s"]),
    "± %": lambda one: f"{one['noise']:.0%}",
    "over PyTorch": lambda one: ratio(one["speedup"]),
    "difference": lambda one: "inf" if one["relative_difference"] is None else f"{one['relative_difference']:.1e}",
    "peak memory": lambda one: _size(one.get("peak_bytes")),
    "grows by": lambda one: _size(one.get("grown_bytes")),
    "ready after s": lambda one: f"{one['ready_after_s']:.1f}",
}


def inference_tables(folder: ResultFolder) -> Iterator[Table]:
    """Yield tables of the runtimes, and of time by kind of layer."""
    runtimes = [{**line, **spread(line["samples_s"])} for line in folder.lines]
    torch_s = next(one["time_s"] for one in runtimes if one["contestant"] == TORCH)
    runtimes = [{**one, "speedup": None if one["failure"] else torch_s / one["time_s"]} for one in runtimes]
    yield _runtimes_table(folder, runtimes)
    if known := [one for one in runtimes if one.get("kinds_s")]:
        rows = [((one["contestant"],), one["kinds_s"]) for one in known]
        table = kinds_table(folder.header.source, ("runtime",), rows)
        table.caption = "timed in place in separate calls, if layers are not compiled"
        yield table


def _runtimes_table(folder: ResultFolder, runtimes: Sequence[_Cell]) -> Table:
    """Return a table with a row for each runtime, and notes on runtimes that failed or gave different outputs."""
    count = folder.header.environment.threads
    threads = "1 thread" if count == 1 else f"{count} threads"
    shape = "×".join(map(str, folder.header.settings["input_shape"]))
    title = f"{folder.header.source}, inference of {shape}, {threads}: runtimes in turns"
    table = new_table(title, ("runtime", "version"), [*_COLUMNS])
    for one in runtimes:
        cells = ("" for _ in _COLUMNS) if one["failure"] else (cell(one) for cell in _COLUMNS.values())
        table.add_row(one["contestant"], one["version"], *cells)
    table.caption = "\n".join(_notes(folder, runtimes))
    return table


def _notes(folder: ResultFolder, runtimes: Sequence[_Cell]) -> Iterator[str]:
    others = [one for one in runtimes if _computes_the_same(one) and not Runtime(one["contestant"]).is_ours]
    ours = next((one for one in runtimes if one["contestant"] == Runtime.MUCUDNN and _computes_the_same(one)), None)
    if others and ours is not None:
        best = min(others, key=lambda one: float(one["time_s"]))
        fused = "fused" if folder.header.settings["fuse"] else "not fused"
        yield f"fastest other, {best['contestant']} / mucudnn, {fused}: {ratio(best['time_s'] / ours['time_s'])}"
    yield "each in a process of its own; ±: spread (IQR / median); difference: of outputs from PyTorch's, relative L2"
    yield "peak memory: of PyTorch's allocator in a call; grows by: what the first call adds to the process"
    for one in runtimes:
        if one["failure"]:
            yield f"{one['contestant']} has no time: {one['failure']}"
        elif not _computes_the_same(one):
            yield f"{one['contestant']} does not compute the same as PyTorch: its time is meaningless"


def _computes_the_same(one: _Cell) -> bool:
    """Return whether a runtime has a time and its outputs equal torch's up to rounding.

    A missing difference counts as infinite.
    """
    difference = one.get("relative_difference")
    return not one["failure"] and difference is not None and difference <= MOST_DIFFERENCE


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_bytes(size_bytes)
