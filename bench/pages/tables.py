"""Tables of text, made from data frames: which columns there are, what they are called, how numbers are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pandas

from mucudnn.bench.folders.rows import COLUMNS
from mucudnn.bench.pages.layer_rows import OPERATIONS
from mucudnn.bench.pages.measured import PUBLISHED, machines_of

_MIB = 2.0**20
_NEUTRAL = {"dilation_h": 1, "dilation_w": 1, "groups": 1, "count": 1}  # columns shown where they say something


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the key in the data frame, the title with the unit, the group of columns that it is part of.

    form: how a number is written, ``None`` for text. scale: what it is multiplied with. filtered: readers pick among
    its values.
    """

    key: str
    title: str
    group: str
    form: str | None = None
    scale: float = 1.0
    filtered: bool = False

    def text(self, value: object) -> str:
        """Return the text of a cell; empty where there is no value."""
        if value is None or value != value:
            return ""
        if self.form is None or not isinstance(value, (int, float)):
            return str(value)
        return format(value * self.scale, self.form)


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table as readers see it: a title, a sentence on what it shows, columns, and rows of text.

    identity: its name in the page.
    """

    identity: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Groups of columns in their order, each with its number of columns."""
        found: list[tuple[str, int]] = []
        for column in self.columns:
            if found and found[-1][0] == column.group:
                found[-1] = (column.group, found[-1][1] + 1)
            else:
                found.append((column.group, 1))
        return found

    @property
    def choices(self) -> list[tuple[int, str, list[str]]]:
        """Columns whose values readers pick among: number of the column, title, values in their order."""
        return [
            (index, column.title, values)
            for index, column in enumerate(self.columns)
            if column.filtered and len(values := list(dict.fromkeys(row[index] for row in self.rows if row[index]))) > 1
        ]


@dataclass(frozen=True, slots=True)
class _Look:
    """Columns of a table in the making."""

    columns: list[Column] = field(default_factory=list)

    def add(self, group: str, *columns: tuple[str, str] | tuple[str, str, str] | tuple[str, str, str, float]) -> None:
        self.columns.extend(Column(key, title, group, *rest) for key, title, *rest in columns)


_WHOLE = ".0f"
_MS = (".4f", 1e3)
_US = (".1f", 1e6)
_LIMIT = ("limit_bytes", "workspace limit, MiB", ".6g", 1 / _MIB)
_SPEEDUP = (
    ("speedup", "speedup over torch", ".3f"),
    ("speedup_low", "from", ".3f"),
    ("speedup_high", "to", ".3f"),
)
# Columns of problems -> DeepBench's own names, in its order, and what its convolutions do not have.
DEEPBENCH = {
    **{"w": "w", "h": "h", "c": "c", "batch_size": "n", "k": "k", "s": "f_w", "r": "f_h"},
    **{name: name for name in ("pad_w", "pad_h", "stride_w", "stride_h", "dilation_w", "dilation_h", "groups")},
    "dtype": "precision",
}
_OF_EVERY_ROW = {"samples", "count"}  # beside the columns of the folder
_FILTERED = {"operation", "contestant", "policy", "limit_bytes", "kind", "memory_format"}


def layer_table(rows: pandas.DataFrame) -> TextTable:
    """Return the table in DeepBench's columns, then ours, of what ``layer_rows`` returned."""
    look = _Look()
    look.add("layer", ("layer", "layer"))
    look.add("contestant", ("contestant", "contestant"), ("policy", "policy"), _LIMIT)
    look.add("DeepBench's columns", *_deepbench_columns(), ("memory_format", "memory format"))
    look.add(
        "time, ms",
        *((f"{name}_s", name.replace("_", " "), *_MS) for name in OPERATIONS.values()),
        ("total_s", "total", *_MS),
    )
    look.add("rate", ("flops_per_s", "TFLOP/s", ".4f", 1e-12))
    look.add("algorithm", *((f"{name}_configuration", name.replace("_", " ")) for name in OPERATIONS.values()))
    _add_ours(look)
    _add_published(look, rows, "total, ms, published elsewhere")
    return _table(
        *("layers", "Layers", "Times of the operations of each layer, in DeepBench's columns, and of all together."),
        *(look, rows),
    )


def _deepbench_columns() -> Iterator[tuple[str, str] | tuple[str, str, str]]:
    for key, title in DEEPBENCH.items():
        yield (key, title) if key == "dtype" else (key, title, _WHOLE)


def problem_table(rows: pandas.DataFrame, subject: Sequence[str]) -> TextTable:
    """Return a row for each subject and contestant, of what ``measured`` returned.

    subject: the columns that say what a row is of.
    """
    look, is_convolution = _Look(), "kind" in rows
    sizes = {*DEEPBENCH, "memory_format"} if is_convolution else set()  # the table of layers has those
    look.add("subject", *((name, name.replace("_", " ")) for name in subject if name not in sizes))
    if is_convolution:
        look.add("subject", ("kind", "kind of layer"), ("batch_size", "n", _WHOLE), ("memory_format", "memory format"))
    look.add("contestant", ("contestant", "contestant"), ("policy", "policy"), _LIMIT)
    look.add("time", ("time_s", "median, ms", *_MS), ("spread", "spread, %", ".1f", 100.0))
    look.add("time", ("samples", "samples", _WHOLE), ("flops_per_s", "TFLOP/s", ".4f", 1e-12))
    look.add("configuration", ("configuration", "configuration"))
    _add_ours(look)
    _add_metrics(look)
    _add_published(look, rows, "ms, published elsewhere")
    if not is_convolution:
        _add_others(look, rows, subject)
    look.add("no time", ("failure", "why there is none"))
    return _table(
        *("problems", "Operations", "Each operation of each layer, and each contestant: medians of the samples."),
        *(look, rows.assign(samples=rows["samples_s"].map(len))),
    )


def summary_table(rows: pandas.DataFrame) -> TextTable:
    """Return what ``summary_rows`` returned."""
    look = _Look()
    look.add("contestant", ("contestant", "contestant"), ("policy", "policy"), _LIMIT, ("problems", "timed", _WHOLE))
    look.add("speedup over torch, geometric mean", ("speedup", "all", ".3f"))
    look.add(
        "speedup over torch, geometric mean",
        *((f"speedup_{name}", name.replace("_", " "), ".3f") for name in OPERATIONS.values()),
    )
    look.add("limit", ("over_bound", "time / bound, geometric mean", ".3f"))
    look.add("sum of times, ms", ("total_s", "all", *_MS), ("torch_s", "torch for the same", *_MS))
    return _table("summary", "Summary", "Each contestant over all that it was timed on.", look, rows)


def _add_ours(look: _Look) -> None:
    look.add("speedup, 95 % interval", *_SPEEDUP)
    look.add("mucudnn", ("workspace_bytes", "workspace, MiB", ".3f", 1 / _MIB))
    look.add("mucudnn", ("relative_error", "relative error", ".1e"))
    look.add("limit", ("over_bound", "time / bound", ".3f"))
    look.add("machine", ("load", "load, %", ".0f", 100.0))


def _add_metrics(look: _Look) -> None:
    """Add the columns of operator metrics."""
    look.add("error against float64", ("error_l1", "sum", ".1e"), ("error_l2", "Euclidean", ".1e"))
    look.add("error against float64", ("error_max", "largest", ".1e"))
    look.add("gradient", ("gradient_error", "relative error", ".1e"), ("gradcheck", "gradcheck"))
    look.add("repeated runs", ("runs", "runs", _WHOLE), ("distinct_results", "distinct results", _WHOLE))
    look.add("rate", ("samples_per_s", "samples / s", ".1f"))
    look.add("overhead of the module, µs", ("overhead_s", "median", *_US), ("overhead_low_s", "from", *_US))
    look.add("overhead of the module, µs", ("overhead_high_s", "to", *_US))


def _add_others(look: _Look, rows: pandas.DataFrame, subject: Sequence[str]) -> None:
    """Add what only this benchmark has: numbers and texts, named as in the folder, in ms and MiB where they end so."""
    look.add("whole model", ("images_per_s", "images/s", ".4g"), ("kinds", "share of time by kind of layer"))
    known = {*COLUMNS, *subject, *(column.key for column in look.columns), *_OF_EVERY_ROW}
    for key in (str(name) for name in rows.columns if name not in known):
        values = rows[key].dropna()
        if values.map(lambda value: isinstance(value, (list, dict))).any():
            continue
        title = key.replace("_", " ")
        if not values.map(lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)).all():
            look.add("more", (key, title))
        elif key.endswith("_bytes"):
            look.add("more", (key, f"{title.removesuffix(' bytes')}, MiB", ".3f", 1 / _MIB))
        elif key.endswith("_s"):
            look.add("more", (key, f"{title.removesuffix(' s')}, ms", *_MS))
        else:
            look.add("more", (key, title, ".6g"))


def _add_published(look: _Look, rows: pandas.DataFrame, group: str) -> None:
    look.add(group, *((f"{PUBLISHED}{machine}", machine, *_MS) for machine in machines_of(rows)))


def _table(identity: str, title: str, caption: str, look: _Look, rows: pandas.DataFrame) -> TextTable:
    columns = [column for column in look.columns if column.key in rows and _says_something(rows, column.key)]
    shown = tuple(_marked(column) for column in columns)
    cells = [[column.text(value) for value in rows[column.key].tolist()] for column in shown]
    return TextTable(identity, title, caption, shown, tuple(zip(*cells, strict=True)))


def _marked(column: Column) -> Column:
    is_filtered = column.key in _FILTERED
    return Column(column.key, column.title, column.group, column.form, column.scale, is_filtered)


def _says_something(rows: pandas.DataFrame, key: str) -> bool:
    """Whether a column has values, and others than those that are so anyway."""
    values = rows[key].dropna()
    return len(values) > 0 and not (key in _NEUTRAL and (values == _NEUTRAL[key]).all())
