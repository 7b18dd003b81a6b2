"""Tables of accuracy and time of the operations in a result folder, and a figure of their error maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.pages.measured import measured
from mucudnn.bench.report.plots import new_figure
from mucudnn.bench.report.tables import milliseconds, new_table
from mucudnn.bench.suites.accuracy.metrics import PASSED
from mucudnn.bench.suites.accuracy.modules import MODULE
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Record = dict[Any, Any]
_Cells = Callable[[_Record], Sequence[str]]
_INCHES = 2.1  # width and height of a map
_LEAST_OF_LARGEST = 1e-3  # lower end of the color scale, relative to the largest error
_NAMES = ("operation", "algorithm")
_OF_LAYERS = (
    "gradient: error of a derivative along a random direction, in the layer's own dtype, against differences",
    "gradcheck: PyTorch's, in float64, of the layer cut down to few channels",
    "ms: median of a call through the module, as in training; overhead: its time beyond the algorithm alone in the "
    "same round",
)
_OF_MODULES = (
    "backward_data: the gradient of the input; backward_filter: the gradients of all parameters together",
    "gradient: error of a derivative along the gradient, against differences of the module in float64",
    "gradcheck: PyTorch's, of the module in float64 on two samples, element by element; of a large module at random "
    "elements",
    "ms: median of a call, as in training",
)


def metrics_tables(folder: ResultFolder) -> Iterator[Table | str]:
    """Yield a table of errors and one of times, with a row for each operation and contestant, then a legend."""
    rows = measured(folder).to_dict("records")
    errors = {"relative_error": "relative", "error_l1": "L1", "error_l2": "L2", "error_max": "maximum"}
    yield _table(
        *(folder, rows, (*errors.values(), "gradient", "gradcheck", "results")),
        lambda row: (
            *(_if_known(row[name], "{:.1e}".format) for name in (*errors, "gradient_error")),
            _if_known(row["gradcheck"], lambda text: text.partition(":")[0]),
            f"{row['distinct_results']:.0f} of {row['runs']:.0f}",
        ),
    )
    yield _table(
        *(folder, rows, ("ms", "IQR", "samples/s", "GFLOP/s", "overhead (µs)", "95 % interval", "workspace")),
        lambda row: (
            *(milliseconds(row["time_s"]), f"{row['spread']:.0%}"),
            f"{row['samples_per_s']:.1f}",
            _if_known(row.get("flops_per_s"), lambda rate: f"{rate / 1e9:.1f}"),
            _if_known(row["overhead_s"], lambda seconds: f"{seconds * 1e6:.0f}"),
            _if_known(row["overhead_low_s"], lambda low: f"{low * 1e6:.0f} to {row['overhead_high_s'] * 1e6:.0f}"),
            _if_known(row["workspace_bytes"], lambda size: format_bytes(int(size))),
        ),
    )
    yield in_words(folder)


def _table(folder: ResultFolder, rows: Sequence[_Record], titles: Sequence[str], cells: _Cells) -> Table:
    printed = new_table(f"{folder.header.source}, {folder.header.settings['layer']}", _NAMES, titles)
    before = ""
    for row in rows:
        operation = str(row["operation"])
        if operation != before:
            printed.add_section()
        texts = (row["failure"],) if isinstance(row["failure"], str) else cells(row)
        printed.add_row(operation if operation != before else "", row["contestant"], *texts)
        before = operation
    return printed


def _if_known(value: Any, text: Callable[[Any], str]) -> str:
    """Format a value with the function ``text``; return an empty text if the value is None or NaN."""
    return "" if value is None or value != value else text(value)


def in_words(folder: ResultFolder) -> str:
    """Explain the columns, and list failed or skipped gradient checks and contestants that were left out."""
    checks = ((str(row["contestant"]), row.get("gradcheck")) for row in folder.lines)
    unusual = ((name, text) for name, text in checks if text is not None and text != PASSED)
    lines = [
        "relative, L1, L2, maximum: norms of the error against float64; relative: L2 over that of the result",
        *(_OF_MODULES if MODULE in set(folder.rows.get("contestant", ())) else _OF_LAYERS),
        "results: number of results that differ in any bit, of all runs; 1: repeatable",
        *_grouped("gradcheck", unusual),
    ]
    lines += _grouped("left out", ((one.what.rpartition(": ")[2], one.reason) for one in folder.left_out))
    return "\n".join((*lines, *folder.problems))


def _grouped(title: str, named: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each reason, with the names of the items it applies to. named: reasons by name."""
    names: dict[str, list[str]] = {}
    for name, reason in named:
        names.setdefault(reason, []).append(name)
    return (f"{title}: {', '.join(dict.fromkeys(of))}: {reason}" for reason, of in names.items())


def draw_error_maps(folder: ResultFolder) -> Figure:
    """Draw a figure of error maps, with a column for each algorithm and a row for each operation.

    Maps of one operation share a logarithmic color scale. Result rows without a map are left out.
    """
    maps = {
        (row["operation"], row["contestant"]): np.array(row["error_map"], dtype=float)
        for row in folder.lines
        if row.get("error_map")
    }
    maps = {key: cells for key, cells in maps.items() if np.isfinite(cells).all()}
    if not maps:
        return new_figure(6, 1, "no errors to draw: see the reasons in the table")
    operations, names = (list(dict.fromkeys(key[place] for key in maps)) for place in (0, 1))
    title = f"Mean absolute error against float64: {folder.header.source}, {folder.header.settings['layer']}"
    figure = new_figure(1 + _INCHES * len(names), 0.6 + _INCHES * len(operations), title.replace("$", r"\$"))
    every = figure.subplots(len(operations), len(names), squeeze=False)
    for line, operation in zip(every, operations, strict=True):
        _draw_operation(figure, line, operation, [(name, maps.get((operation, name))) for name in names])
    return figure


def _draw_operation(
    figure: Figure, line: Any, operation: str, maps: list[tuple[str, np.ndarray[Any, Any] | None]]
) -> None:
    from matplotlib.colors import LogNorm

    largest = max(cells.max() for _, cells in maps if cells is not None) or 1.0
    present = np.concatenate([cells[cells > 0] for _, cells in maps if cells is not None])
    least = min(present.min(), 0.5 * largest) if present.size else _LEAST_OF_LARGEST * largest
    shades: Any = None
    for axes, (name, cells) in zip(line, maps, strict=True):
        axes.set_title(f"{name}\n{operation.replace('_', ' ')}".replace("$", r"\$"), fontsize=8)
        axes.set_xticks([])
        axes.set_yticks([])
        if cells is None:
            axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
            continue
        shades = axes.imshow(np.maximum(cells, least), cmap="viridis", norm=LogNorm(least, largest))
    figure.colorbar(shades, ax=list(line), fraction=0.02, pad=0.01)
