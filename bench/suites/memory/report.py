"""Tells in short what a result folder has of memory and time of training steps."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import Line
from mucudnn.bench.report.tables import images_per_s, milliseconds, new_table, ratio
from mucudnn.words.results import WholeRun
from mucudnn.words.units import format_bytes

_PEAKS = ("allocator_peak_bytes", "resident_peak_bytes")


def memory_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table with a row for each contestant, torch first, and a line for each beside torch.

    Ratios are to torch, speedups are of the whole step.
    """
    torchs = folder.lines[0]
    n = torchs["batch_size"]
    columns = ("allocator peak", "ratio", "resident peak", "ratio", "step ms", "images/s", "speedup")
    printed = new_table(f"{torchs['network']}, batch {n}: one training step", ("convolutions",), columns)
    lines = []
    for line in folder.lines:
        if line["failure"]:
            printed.add_row(_name(line), line["failure"])
            lines.append(f"{_name(line)}: {line['failure']}")
            continue
        step = WholeRun.of(torchs["samples_s"], line["samples_s"])
        speedup = "" if line is torchs else f"{ratio(step.speedup)} ± {step.noise:.2f}"
        peaks = (cell for name in _PEAKS for cell in _peak(line[name], torchs[name]))
        printed.add_row(_name(line), *peaks, milliseconds(step.time_s), images_per_s(n, step.time_s), speedup)
        if line is not torchs:
            needed = line["allocator_peak_bytes"] / torchs["allocator_peak_bytes"]
            lines.append(f"{_name(line)}: {needed:.3f} of PyTorch's memory, {ratio(step.speedup)} as fast")
    yield printed
    counted = "allocator: on top of parameters, buffers and input"
    if runs := folder.header.settings["runs"]:
        counted += f"; resident: of a whole process, median of {runs}"
    yield "\n".join((*lines, counted))


def _name(line: Line) -> str:
    return f"{line['contestant']}, {line['bound']}" if line["bound"] else line["contestant"]


def _peak(size_bytes: int | None, torchs_bytes: int | None) -> tuple[str, str]:
    """Return the size and its ratio to torch's; empty where it was not measured."""
    if size_bytes is None or torchs_bytes is None:
        return "", ""
    return format_bytes(size_bytes), f"{size_bytes / torchs_bytes:.3f}"
