"""Text tables made from data frames: their columns, titles and number formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas

from mucudnn.bench.results.pages.drawing import series_label
from mucudnn.bench.results.pages.measured import OPERATIONS, PUBLISHED, machines_of
from mucudnn.bench.results.reading import ROW_COLUMNS


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its key in the data frame, its group of columns, and its title with the unit.

    form: format of its numbers, None for text. scale: factor that numbers are multiplied by.
    """

    key: str
    group: str
    title: str
    form: str | None = None
    scale: float = 1.0

    def text(self, value: object) -> str:
        """Format a value for a cell of this column; return an empty text if there is no value."""
        if value is None or value != value:
            return ""
        if self.form is None or not isinstance(value, (int, float)):
            return str(value)
        return format(value * self.scale, self.form)


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table whose cells are formatted text. identity: the table's ``id`` attribute in the HTML page."""

    identity: str
    title: str
    caption: str
    columns: Sequence[Column]
    rows: Sequence[tuple[str, ...]]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The groups of adjacent columns: the name of each and its number of columns."""
        return [(group, len(list(of))) for group, of in groupby(self.columns, lambda column: column.group)]

    @property
    def choices(self) -> list[tuple[int, str, list[str]]]:
        """The columns that readers can filter by: the index, title and sorted values of each."""
        return [
            (index, column.title, values)
            for index, column in enumerate(self.columns)
            if column.key in _FILTERED
            and len(values := list(dict.fromkeys(row[index] for row in self.rows if row[index]))) > 1
        ]


_FILTERED = {"operation", "contestant", "policy", "limit_bytes", "kind", "memory_format"}
# Columns are hidden where all rows have these values.
_NEUTRAL = {"dilation_h": 1, "dilation_w": 1, "groups": 1, "count": 1, "busy": 0}
_MIB = 2.0**20
_MS = (".4f", 1e3)
# Names of problem columns in DeepBench, in its order, followed by columns that DeepBench lacks.
DEEPBENCH = {
    **{"w": "w", "h": "h", "c": "c", "batch_size": "n", "k": "k", "s": "f_w", "r": "f_h"},
    **{name: name for name in ("pad_w", "pad_h", "stride_w", "stride_h", "dilation_w", "dilation_h", "groups")},
    "dtype": "precision",
}
_CONTESTANT = (
    Column("contestant", "contestant", "contestant"),
    Column("policy", "contestant", "policy"),
    Column("limit_bytes", "contestant", "workspace limit, MiB", ".6g", 1 / _MIB),
)
_INTERVAL = "speedup, 95 % interval"
_SPEEDUP = (
    Column("speedup", _INTERVAL, "speedup over PyTorch", ".3f"),
    Column("speedup_low", _INTERVAL, "from", ".3f"),
    Column("speedup_high", _INTERVAL, "to", ".3f"),
)
_SAME = Column("same", "configuration", "same configuration, timed once")
_GAIN = "speedup over the best undivided, geometric mean"
_OURS = (
    Column("workspace_bytes", "mucudnn", "workspace, MiB", ".3f", 1 / _MIB),
    Column("relative_error", "mucudnn", "relative error", ".1e"),
    Column("over_bound", "limit", "time / bound", ".3f"),
    Column("load", "machine", "load, %", ".0f", 100.0),
)
_LAYERS = (
    Column("layer", "layer", "layer"),
    *_CONTESTANT,
    *_SPEEDUP,
    *(Column(key, "DeepBench's columns", title, None if key == "dtype" else ".0f") for key, title in DEEPBENCH.items()),
    Column("memory_format", "DeepBench's columns", "memory format"),
    *(Column(f"{name}_s", "time, ms", name.replace("_", " "), *_MS) for name in OPERATIONS.values()),
    Column("total_s", "time, ms", "total", *_MS),
    Column("flops_per_s", "rate", "TFLOP/s", ".4f", 1e-12),
    *(Column(f"{name}_configuration", "configuration", name.replace("_", " ")) for name in OPERATIONS.values()),
    _SAME,
    *_OURS,
)
_OF_CONVOLUTIONS = (
    Column("kind", "subject", "kind of layer"),
    Column("batch_size", "subject", "n", ".0f"),
    Column("memory_format", "subject", "memory format"),
)
_PROBLEMS = (
    *_CONTESTANT,
    *_SPEEDUP,
    Column("time_s", "time", "median, ms", *_MS),
    Column("spread", "time", "spread, %", ".1f", 100.0),
    Column("samples", "time", "samples", ".0f"),
    Column("flops_per_s", "time", "TFLOP/s", ".4f", 1e-12),
    Column("configuration", "configuration", "configuration"),
    _SAME,
    *_OURS,
    # Columns of operator metrics.
    Column("error_l1", "error against float64", "sum", ".1e"),
    Column("error_l2", "error against float64", "Euclidean", ".1e"),
    Column("error_max", "error against float64", "largest", ".1e"),
    Column("gradcheck", "gradient", "gradcheck"),
    Column("runs", "repeated runs", "runs", ".0f"),
    Column("distinct_results", "repeated runs", "distinct results", ".0f"),
    Column("not_finite_by_definition", "not finite after NaN", "by definition", ".0f"),
    Column("not_finite", "not finite after NaN", "as computed", ".0f"),
)
_OF_MODELS = (
    Column("images_per_s", "whole model", "images/s", ".4g"),
    Column("kinds", "whole model", "share of time by kind of layer"),
)
_MEAN = "speedup over PyTorch, geometric mean"
_SUMMARY = (
    Column("dtype", "tensors", "dtype"),
    Column("memory_format", "tensors", "memory format"),
    *_CONTESTANT,
    Column("problems", "contestant", "timed", ".0f"),
    Column("speedup", _MEAN, "speedup", ".3f"),
    Column("speedup_low", _MEAN, "from", ".3f"),
    Column("speedup_high", _MEAN, "to", ".3f"),
    Column("busy", _MEAN, "timed on a busy machine", ".0f"),
    *(Column(f"speedup_{name}", _MEAN, name.replace("_", " "), ".3f") for name in OPERATIONS.values()),
    Column("over_undivided", _GAIN, "over undivided", ".3f"),
    Column("over_undivided_least", _GAIN, "least", ".3f"),
    Column("over_undivided_most", _GAIN, "most", ".3f"),
    Column("same", _GAIN, "same configuration", ".0f"),
    Column("over_bound", "limit", "time / bound, geometric mean", ".3f"),
    Column("total_s", "sum of times", "sum, ms", *_MS),
    Column("torch_s", "sum of times", "PyTorch for the same, ms", *_MS),
)


def summary_table(rows: pandas.DataFrame) -> TextTable:
    """Format the rows of ``summary_rows`` as a table, with a line for each contestant, policy and limit."""
    return _table("summary", "Summary", "Each contestant over all that it was timed on.", _SUMMARY, rows)


def layer_table(rows: pandas.DataFrame) -> TextTable:
    """Format the rows of ``layer_rows`` as a table, with DeepBench's columns before mucudnn's own."""
    caption = "Times of the operations of each layer, in DeepBench's columns, and of all together."
    columns = (*_LAYERS, *_published(rows, "total, ms, published elsewhere"))
    if len(rows):
        timed = [f"{name}_{of}" for name in OPERATIONS.values() for of in ("configuration", "s")]
        rows = _once(rows, ["layer", *DEEPBENCH, "memory_format", *timed, "total_s"])
    return _table("layers", "Layers", caption, columns, rows)


def problem_table(rows: pandas.DataFrame, subject: Sequence[str]) -> TextTable:
    """Format the rows of ``measured`` as a table, with a line for each subject and contestant.

    subject: the columns that identify a subject, such as the layer and the operation.
    """
    is_convolution = "kind" in rows
    sizes = {*DEEPBENCH, "memory_format"} if is_convolution else set()  # The table of layers has these columns.
    columns = [Column(name, "subject", name.replace("_", " ")) for name in subject if name not in sizes]
    columns += [*_OF_CONVOLUTIONS, *_PROBLEMS] if is_convolution else [*_PROBLEMS, *_OF_MODELS]
    columns += _published(rows, "ms, published elsewhere")
    if not is_convolution:
        columns += _others(rows, {*ROW_COLUMNS, *subject, *(column.key for column in columns), "count"})
    columns.append(Column("failure", "no time", "why there is none"))
    caption = "Each operation of each layer, and each contestant: medians of the samples."
    rows = _once(rows.assign(samples=rows["samples_s"].map(len)), [*subject, "configuration", "time_s"])
    return _table("problems", "Operations", caption, columns, rows)


def _once(rows: pandas.DataFrame, keys: Sequence[str]) -> pandas.DataFrame:
    """Return one row for each configuration of a subject, with the column ``same``: the others that chose it.

    keys: the columns in which such rows are equal, the time last.
    """
    if "policy" not in rows:
        return rows
    subjects = pandas.Series([str(of) for of in rows[keys].itertuples(index=False, name=None)], rows.index)
    again = rows["policy"].notna() & rows[keys[-1]].notna() & subjects.duplicated()
    every = zip(*(rows[again][name] for name in ("contestant", "policy", "limit_bytes")), strict=True)
    names = pandas.Series([series_label(*each) for each in every], rows.index[again], dtype=object)
    same = {key: "; ".join(of) for key, of in names.groupby(subjects[again], sort=False)}
    return rows[~again].assign(same=subjects[~again].map(same))


def _published(rows: pandas.DataFrame, group: str) -> list[Column]:
    return [Column(f"{PUBLISHED}{machine}", group, machine, *_MS) for machine in machines_of(rows)]


def _others(rows: pandas.DataFrame, known: set[str]) -> Iterator[Column]:
    """Yield table columns for the keys not in ``known``, with keys in ``_s`` shown in ms and ``_bytes`` in MiB."""
    for key in (str(name) for name in rows.columns if name not in known):
        values, title = rows[key].dropna(), key.replace("_", " ")
        if values.map(lambda value: isinstance(value, (list, dict))).any():
            continue
        if not values.map(lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)).all():
            yield Column(key, "more", title)
        elif key.endswith("_bytes"):
            yield Column(key, "more", f"{title.removesuffix(' bytes')}, MiB", ".3f", 1 / _MIB)
        elif key.endswith("_s"):
            yield Column(key, "more", f"{title.removesuffix(' s')}, ms", *_MS)
        else:
            yield Column(key, "more", title, ".6g")


def _table(identity: str, title: str, caption: str, columns: Sequence[Column], rows: pandas.DataFrame) -> TextTable:
    shown = [column for column in columns if column.key in rows and _says_something(rows, column.key)]
    cells = [[column.text(value) for value in rows[column.key].tolist()] for column in shown]
    return TextTable(identity, title, caption, shown, list(zip(*cells, strict=True)))


def _says_something(rows: pandas.DataFrame, key: str) -> bool:
    """Return whether any row has a value other than the neutral one in this column."""
    values = rows[key].dropna()
    return len(values) > 0 and not (key in _NEUTRAL and (values == _NEUTRAL[key]).all())
