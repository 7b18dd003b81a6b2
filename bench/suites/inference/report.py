"""A run of the inference benchmark: its result folder, the columns of its rows, and its tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from mucudnn.bench.contests.variants import TORCH, Runtime
from mucudnn.bench.folders.header import Header
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.writing import FolderWriter, open_folder
from mucudnn.bench.report.records import config_record
from mucudnn.bench.report.tables import images_per_s, kinds_table, milliseconds, new_table, ratio, spread
from mucudnn.measuring.timing.timer import Clock, WallClock
from mucudnn.running.environment import current_environment
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.units import format_bytes

FILTERS, RUNTIMES = "kept filters", "runtimes"  # the parts of the benchmark
NOT_KEPT, KEPT = "mucudnn-not-kept", "mucudnn"  # contestants of the part FILTERS, in addition to torch
WHOLE = "the whole model"  # in place of a layer
SUBJECT_COLUMNS = ("network", "part", "layer", "batch_size", "memory_format")


@dataclass(frozen=True, slots=True)
class InferenceRun:
    """A run of the inference benchmark on one model with one input.

    clock: times calls, but not tuning; the processes of runtimes have their own clocks.
    """

    folder: FolderWriter
    name: str
    batch_size: int
    memory_format: MemoryFormat
    rounds: int
    clock: Clock = field(default_factory=WallClock)

    @classmethod
    @contextmanager
    def opened(
        cls,
        out: Path,
        name: str,
        input_shape: Sequence[int],
        memory_format: MemoryFormat,
        config: Config,
        rounds: int,
        parts: Sequence[str],
    ) -> Iterator[InferenceRun]:
        """Open the result folder ``out`` for a run. parts: each part of the run with its contestants, as text.

        Raises the errors of ``open_folder``.
        """
        settings = {
            "input_shape": list(input_shape),
            "memory_formats": [str(memory_format)],
            "rounds": rounds,
            "parts": list(parts),
            **config_record(config),
        }
        header = Header(*("inference", name, settings, current_environment()), SUBJECT_COLUMNS, wanted=len(parts))
        with open_folder(out, header) as folder:
            try:
                yield cls(folder, name, input_shape[0], memory_format, rounds)
            finally:
                folder.write_summary()

    def subject(self, part: str, layer: str = WHOLE) -> dict[str, Any]:
        """Return the columns that identify the result rows of a layer or of the whole model."""
        values = (self.name, part, layer, self.batch_size, str(self.memory_format))
        return dict(zip(SUBJECT_COLUMNS, values, strict=True))

    def is_known(self, part: str, layer: str = WHOLE) -> bool:
        """Return whether the result folder already has the rows of this layer."""
        return bool(self.folder.known(self.subject(part, layer)))


MOST_DIFFERENCE = 1e-3  # Larger relative differences of float32 outputs count as errors, smaller ones as rounding.

_Cell = Mapping[str, Any]  # a row, with ``time_s``, ``noise``, ``speedup`` over torch and ``batch_size``
_Variants = Mapping[str, _Cell]  # rows of one layer by contestant

_COLUMNS: Mapping[str, Callable[[_Variants], str]] = {
    "PyTorch ms": lambda rows: milliseconds(rows[TORCH]["time_s"]),
    "not kept ms": lambda rows: milliseconds(rows[NOT_KEPT]["time_s"]),
    "kept ms": lambda rows: milliseconds(rows[KEPT]["time_s"]),
    "± %": lambda rows: f"{rows[KEPT]['noise']:.0%}",
    "over PyTorch": lambda rows: ratio(rows[TORCH]["time_s"] / rows[KEPT]["time_s"]),
    "over not kept": lambda rows: ratio(rows[NOT_KEPT]["time_s"] / rows[KEPT]["time_s"]),
}
_RUNTIME_COLUMNS: Mapping[str, Callable[[_Cell], str]] = {
    "ms": lambda one: milliseconds(one["time_s"]),
    "images/s": lambda one: images_per_s(one["batch_size"], one["time_s"]),
    "± %": lambda one: f"{one['noise']:.0%}",
    "over PyTorch": lambda one: ratio(one["speedup"]),
    "difference": lambda one: "inf" if one["relative_difference"] is None else f"{one['relative_difference']:.1e}",
    "grows by": lambda one: "" if one.get("grown_bytes") is None else format_bytes(one["grown_bytes"]),
    "ready after s": lambda one: f"{one['ready_after_s']:.1f}",
}


def inference_tables(folder: ResultFolder) -> Iterator[Table]:
    """Yield tables of convolutions with and without cached filters, of the runtimes, and of time by kind of layer."""
    cells = [{**line, **spread(line["samples_s"])} for line in folder.lines]
    layers: dict[str, dict[str, _Cell]] = {}
    for cell in cells:
        if cell["part"] == FILTERS:
            layers.setdefault(cell["layer"], {})[cell["contestant"]] = cell
    runtimes = [cell for cell in cells if cell["part"] == RUNTIMES]
    if WHOLE in layers:
        yield _filters_table(folder, layers)
    if runtimes:
        torch_s = next(one["time_s"] for one in runtimes if one["contestant"] == TORCH)
        runtimes = [{**one, "speedup": None if one["failure"] else torch_s / one["time_s"]} for one in runtimes]
        yield _runtimes_table(folder, runtimes)
    if known := [one for one in runtimes if one.get("kinds_s")]:
        rows = [((one["contestant"],), one["kinds_s"]) for one in known]
        table = kinds_table(folder.header.source, ("runtime",), rows)
        table.caption = "timed in place in separate calls, if layers are not compiled"
        yield table


def _filters_table(folder: ResultFolder, layers: Mapping[str, _Variants]) -> Table:
    """Return a table of each convolution's times, its speedup by cached filters, and the size of these filters."""
    whole = layers[WHOLE]
    each = {name: rows for name, rows in layers.items() if name != WHOLE}
    kept_bytes, filter_bytes = (
        sum(rows[KEPT][key] for rows in each.values()) for key in ("kept_bytes", "filter_bytes")
    )
    footer = (WHOLE, "", *_cells(whole), format_bytes(kept_bytes))
    title = f"{folder.header.source}, inference of {_shape(folder)}"
    table = new_table(title, ("layer", "configuration"), (*_COLUMNS, "kept bytes"), footer)
    for name, rows in each.items():
        not_kept, kept = rows[NOT_KEPT]["configuration"], rows[KEPT]["configuration"]
        configurations = not_kept if kept == not_kept and not rows[KEPT]["kept_bytes"] else f"{not_kept} → {kept}"
        table.add_row(name, configurations, *_cells(rows), format_bytes(rows[KEPT]["kept_bytes"]))
    budget = Config(cache_budget=folder.header.settings["cache_budget"]).cache_budget_bytes
    table.caption = (
        f"filters: {format_bytes(filter_bytes)}; budget of what is kept of them: {format_bytes(budget)}; "
        "±: spread (IQR / median) of the times with kept filters"
    )
    return table


def _cells(rows: _Variants) -> list[str]:
    return [cell(rows) for cell in _COLUMNS.values()]


def _runtimes_table(folder: ResultFolder, runtimes: Sequence[_Cell]) -> Table:
    """Return a table with a row for each runtime, and notes on runtimes that failed or gave different outputs."""
    count = folder.header.environment.threads
    threads = "1 thread" if count == 1 else f"{count} threads"
    title = f"{folder.header.source}, inference of {_shape(folder)}, {threads}: runtimes in turns"
    table = new_table(title, ("runtime", "version"), [*_RUNTIME_COLUMNS])
    for one in runtimes:
        cells = ("" for _ in _RUNTIME_COLUMNS) if one["failure"] else (cell(one) for cell in _RUNTIME_COLUMNS.values())
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


def _shape(folder: ResultFolder) -> str:
    return "×".join(map(str, folder.header.settings["input_shape"]))
