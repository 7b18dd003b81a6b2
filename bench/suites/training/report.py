"""Tables of training steps, made from a result folder: a row for each variant and setting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from mucudnn.bench.results.reading import ResultFolder
from mucudnn.bench.results.text_tables import (
    bound_in_words,
    images_per_s,
    kinds_table,
    milliseconds,
    new_table,
    ratio,
    spread,
)
from mucudnn.bench.results.variants import How, Variant
from mucudnn.bench.suites.training.step_job import COLUMNS
from mucudnn.core.values import format_bytes

Cell = Mapping[str, Any]  # a row of the folder, with ``time_s``, ``noise`` and ``torch``, torch's row of the setting

_NUMBERS: Mapping[str, Callable[[Cell], str]] = {
    "step ms": lambda cell: milliseconds(cell["time_s"]),
    "images/s": lambda cell: images_per_s(cell["batch_size"], cell["time_s"]),
    "IQR / median": lambda cell: f"{cell['noise']:.1%}",
    "speedup": lambda cell: _to_torch(cell, lambda one: float(one["time_s"]), ratio),
    "peak memory": lambda cell: format_bytes(cell["peak_bytes"]),
    "ratio": lambda cell: _to_torch(cell, lambda one: 1 / one["peak_bytes"], "{:.3f}".format),
}
_LEFT = ("precision", "memory format", "convolutions")
_SPLIT = ("forward ms", "backward ms", "speedup", "rest ms", "rest ratio")
_SUMMARY = ("PyTorch ms", "mucudnn ms", "speedup", "in convolutions", "their share", "rest ratio")


def cells_of(folder: ResultFolder) -> list[Cell]:
    """Return the rows with three additional keys: ``time_s``, ``noise`` (IQR / median), and ``torch``.

    ``torch`` is torch's row in the same setting.
    """
    lines = [{**line, **spread(line["samples_s"])} for line in folder.lines]
    torchs = {_setting(line): line for line in lines if line["contestant"] == Variant.TORCH and line["samples_s"]}
    return [{**line, "torch": torchs.get(_setting(line))} for line in lines]


def training_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield up to three tables for each network, a summary if there are several networks, and the settings left out."""
    cells, bound = cells_of(folder), bound_in_words(folder.header.settings)
    networks = [[*group] for _, group in groupby(cells, lambda cell: (cell["network"], cell["batch_size"]))]
    for group in networks:
        yield training_steps_table(group, bound)
        if any(map(_is_split, group)):
            yield training_split_table(group)
        if any(cell.get("kinds_s") for cell in group):
            yield training_kinds_table(group)
    if len(networks) > 1:
        yield training_summary(cells, bound)
    for cell in cells:
        if reason := cell.get("not_split"):
            yield f"{cell['network']}, {cell['contestant']}: {reason}"
    for one in folder.left_out:
        yield f"{one.what}: {one.reason}"


def training_summary(cells: Sequence[Cell], bound: str) -> Table:
    """Return a table of mucudnn's step against torch's, with a row for each network, precision and memory format."""
    title = f"training steps, {bound}"
    printed = new_table(title, ("network", "batch", "precision", "memory format"), _SUMMARY)
    for cell in cells:
        if cell["contestant"] == Variant.MUCUDNN:
            left = cell["network"], str(cell["batch_size"]), cell["precision"], cell["memory_format"]
            printed.add_row(*left, *_summed_up(cell))
    printed.caption = (
        "speedups of the step and of its convolutions in place; their share of PyTorch's step; rest: all other layers"
    )
    return printed


def training_split_table(cells: Sequence[Cell]) -> Table:
    """Return a table of one network's times in convolutions and in all other parts of a step.

    Ratios are relative to torch in the same precision and memory format.
    """
    printed = _table(cells, "where the time of a step goes", _SPLIT)
    for cell in filter(_is_split, cells):
        printed.add_row(*_left(cell), *_parts(cell))
    printed.caption = (
        "forward, backward: convolutions, timed in place in rounds of their own; rest: all that is not a convolution"
    )
    return printed


def training_kinds_table(cells: Sequence[Cell]) -> Table:
    """Return a table of the share of each kind of layer in the time of one network's steps."""
    rows = [(_left(cell), cell["kinds_s"]) for cell in cells if cell.get("kinds_s")]
    printed = kinds_table(_title(cells), _LEFT, rows)
    printed.caption = "timed in place in separate steps; in compiled steps, all but convolutions is the rest"
    return printed


def training_steps_table(cells: Sequence[Cell], bound: str) -> Table:
    """Return a table of one network's step times and memory peaks.

    Ratios are relative to torch in the same precision and memory format.
    """
    printed = _table(cells, f"training steps, {bound}", [*_NUMBERS])
    for cell in cells:
        numbers = [cell["failure"]] if cell["failure"] else [shown(cell) for shown in _NUMBERS.values()]
        printed.add_row(*_left(cell), *numbers)
    printed.caption = "speedup and memory relative to PyTorch in the same precision and memory format"
    return printed


def _table(cells: Sequence[Cell], what: str, columns: Sequence[str]) -> Table:
    return new_table(f"{_title(cells)}: {what}", _LEFT, columns)


def _title(cells: Sequence[Cell]) -> str:
    return f"{cells[0]['network']}, batch {cells[0]['batch_size']}"


def _left(cell: Cell) -> tuple[str, str, str]:
    """Return the leftmost cells of a row: precision, memory format, and variant.

    The variant is marked if mucudnn was enabled (tuned during a warm-up step) rather than optimized (tuned beforehand).
    """
    is_enabled = cell["contestant"] == Variant.MUCUDNN and cell["how"] == How.ENABLE
    name = f"{cell['contestant']}, enabled" if is_enabled else cell["contestant"]
    return cell["precision"], cell["memory_format"], name


def _setting(line: Cell) -> tuple[Any, ...]:
    return tuple(line[name] for name in COLUMNS)


def _to_torch(cell: Cell, of: Callable[[Cell], float], shown: Callable[[float], str]) -> str:
    """Format the ratio of torch's number to this row's number; return an empty text if torch failed."""
    return "" if cell["torch"] is None else shown(of(cell["torch"]) / of(cell))


def _is_split(cell: Cell | None) -> bool:
    return cell is not None and cell.get("rest_s") is not None


def _convolutions_s(cell: Cell) -> float:
    return float(cell["forward_convolutions_s"] + cell["backward_convolutions_s"])


def _parts(cell: Cell) -> list[str]:
    """Return the cells of a row in the columns ``_SPLIT``: times of convolutions and of the rest, next to torch's."""
    times = map(milliseconds, (cell["forward_convolutions_s"], cell["backward_convolutions_s"], cell["rest_s"]))
    forward, backward, rest = times
    if not _is_split(cell["torch"]):
        return [forward, backward, "", rest, ""]
    speedup, rest_ratio = (
        _convolutions_s(cell["torch"]) / _convolutions_s(cell),
        cell["rest_s"] / cell["torch"]["rest_s"],
    )
    return [forward, backward, ratio(speedup), rest, f"{rest_ratio:.3f}"]


def _summed_up(cell: Cell) -> list[str]:
    """Return the cells of a row in the columns ``_SUMMARY``, or the reason if there is nothing to compare."""
    torchs = cell["torch"]
    if cell["failure"] or torchs is None:
        return [cell["failure"] or "PyTorch's own failed"]
    texts = [milliseconds(torchs["time_s"]), milliseconds(cell["time_s"]), ratio(torchs["time_s"] / cell["time_s"])]
    if not (_is_split(cell) and _is_split(torchs)):
        return texts
    share = _convolutions_s(torchs) / (_convolutions_s(torchs) + torchs["rest_s"])
    _, _, speedup, _, rest_ratio = _parts(cell)
    return [*texts, speedup, f"{share:.0%}", rest_ratio]
