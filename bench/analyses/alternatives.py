"""Compares a network's convolutions in several memory formats and data types: what else the machine offers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from rich.table import Table

from mucudnn.bench.report.plots import OURS_COLOUR, TORCH_COLOUR, new_figure
from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import milliseconds, new_table, ratio
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.optimizing.alternatives import DTYPES
from mucudnn.words.problem import MemoryFormat, Operation
from mucudnn.words.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Alternatives = Mapping[tuple[str, MemoryFormat], TableTuning]


def alternatives_of(
    dtype: str, memory_format: MemoryFormat, *, dtypes: bool, formats: bool
) -> list[tuple[str, MemoryFormat]]:
    """Return the pairs of dtype and memory format to compare, the given one first."""
    in_dtypes = (dtype, *DTYPES) if dtypes else (dtype,)
    in_formats = (memory_format, *MemoryFormat) if formats else (memory_format,)
    return [*dict.fromkeys(product(in_dtypes, in_formats))]


def alternative_rows(alternatives: Alternatives) -> list[Record]:
    """Return a row for each dtype and memory format: seconds by operation and in all, of PyTorch's own and mucudnn's.

    ``unmeasured``: the number of operations in which PyTorch's own is too slow to be measured, which count with the
    least that they take, or barred, which do not count.
    """
    return [_row(*of, tuning) for of, tuning in alternatives.items()]


def _row(dtype: str, memory_format: MemoryFormat, tuning: TableTuning) -> Record:
    row: Record = {"dtype": dtype, "memory_format": str(memory_format)}
    for operation in (*Operation, None):
        own = [each for each in tuning.rows if operation in (None, each.tuned.problem.operation)]
        name = "" if operation is None else f"{operation}_"
        row[f"{name}torch_s"] = sum(each.count * (each.tuned.least_baseline_s or 0.0) for each in own)
        row[f"{name}mucudnn_s"] = sum(each.count * each.tuned.time_s for each in own)
        row[f"{name}unmeasured"] = sum(each.count for each in own if each.tuned.baseline_s is None)
    return row


def alternatives_table(source: str, rows: Sequence[Record]) -> Table:
    """Return a table with a line for each dtype and memory format; speedups are over PyTorch in the first one."""
    names = [*(f"{operation}_" for operation in Operation), ""]
    right = [f"{name.rstrip('_') or 'total'}: {who} ms" for name in names for who in ("PyTorch", "mucudnn")]
    printed = new_table(source, ("dtype", "memory format"), (*right, "speedup"))
    for row in rows:
        times = [text for name in names for text in (_torchs(row, name), milliseconds(row[f"{name}mucudnn_s"]))]
        speedup = _more(rows[0], "") + ratio(rows[0]["torch_s"] / row["mucudnn_s"])
        printed.add_row(row["dtype"], row["memory_format"], *times, speedup)
    printed.caption = f"speedup over PyTorch in {_named(rows[0])}"
    if any(row["unmeasured"] for row in rows):
        printed.caption += "; '>': in some operations PyTorch is too slow to be measured"
    return printed


def _torchs(row: Record, name: str) -> str:
    return _more(row, name) + milliseconds(row[f"{name}torch_s"])


def _more(row: Record, name: str) -> str:
    return ">" if row[f"{name}unmeasured"] else ""


def in_words(rows: Sequence[Record]) -> str:
    """Compare PyTorch in the first dtype and memory format with mucudnn in the fastest ones, in a sentence."""
    now, best = rows[0], min(rows, key=lambda row: float(row["mucudnn_s"]))
    more = "more than " if now["unmeasured"] else ""
    return (
        f"the convolutions of a step take {more}{format_seconds(now['torch_s'])} with PyTorch in {_named(now)}, "
        f"and {format_seconds(best['mucudnn_s'])} with mucudnn in {_named(best)}: "
        f"{more}{now['torch_s'] / best['mucudnn_s']:.1f} times as fast"
    )


def _named(row: Record) -> str:
    return f"{row['dtype']} and {row['memory_format']}"


def alternatives_record(alternatives: Alternatives, rows: Sequence[Record]) -> Record:
    """Return the JSON object that ``mucudnn explain --json`` writes."""
    tuning = next(iter(alternatives.values()))
    return {**record_header(tuning.config, tuning.environment), "source": tuning.source, "alternatives": [*rows]}


def draw_alternatives(source: str, rows: Sequence[Record]) -> Figure:
    """Draw the total time of PyTorch's own and of mucudnn's in each dtype and memory format."""
    figure = new_figure(2 + 1.2 * len(rows), 4, source)
    axes = figure.subplots()
    for offset, name, colour in ((-0.2, "torch_s", TORCH_COLOUR), (0.2, "mucudnn_s", OURS_COLOUR)):
        places = [index + offset for index in range(len(rows))]
        label = "PyTorch" if name == "torch_s" else "mucudnn"
        axes.bar(places, [row[name] * 1e3 for row in rows], 0.4, color=colour, label=label)
    axes.set_xticks(range(len(rows)), [f"{row['dtype']}\n{row['memory_format']}" for row in rows])
    axes.set_ylabel("convolutions of a step (ms)")
    axes.legend()
    return figure
