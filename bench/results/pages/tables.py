"""Tables made from the data frames of ``measured``: their columns, titles and number formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas

from mucudnn.bench.results.pages.measured import OPERATIONS
from mucudnn.bench.results.reading import CONTESTANT, OF_VOLUMES, ROW_COLUMNS
from mucudnn.core.tables import Column, Table
from mucudnn.core.values import format_bytes

# Columns are hidden where all rows have these values.
_NEUTRAL = {"dilation_h": 1, "dilation_w": 1, "groups": 1, "count": 1, "busy": 0, **dict.fromkeys(OF_VOLUMES, 0)}
_MIB = 2.0**20
_MS = (".4f", 1e3)
# Names of problem columns in DeepBench, in its order, followed by columns that DeepBench lacks.
DEEPBENCH = {
    **{"w": "w", "h": "h", "c": "c", "batch_size": "n", "k": "k", "s": "f_w", "r": "f_h"},
    **{name: name for name in ("pad_w", "pad_h", "stride_w", "stride_h", "dilation_w", "dilation_h", "groups")},
    **{name: name for name in OF_VOLUMES},
    "dtype": "precision",
}


def _group(name: str, *columns: tuple[Any, ...]) -> list[Column]:
    """Return the columns of a group.

    columns: key in the data frame, title, format and factor of numbers.
    """
    return [Column(title, *numbers, group=name, key=key) for key, title, *numbers in columns]


_CONTESTANT = _group(
    "contestant",
    ("contestant", "contestant"),
    ("policy", "policy"),
    ("limit_bytes", "workspace limit, MiB", ".6g", 1 / _MIB),
)
_SPEEDUP = _group(
    "speedup, 95 % interval",
    ("speedup", "speedup over PyTorch", ".3f"),
    ("speedup_low", "from", ".3f"),
    ("speedup_high", "to", ".3f"),
)
_SAME = ("same", "same configuration, timed once")
_OURS = [
    *_group(
        "mucudnn",
        ("workspace_bytes", "workspace, MiB", ".3f", 1 / _MIB),
        ("relative_error", "relative error", ".1e"),
    ),
    *_group("limit", ("over_bound", "time / bound", ".3f")),
    *_group("machine", ("load", "load, %", ".0f", 100.0)),
]
_LAYERS = [
    *_group("layer", ("layer", "layer")),
    *_CONTESTANT,
    *_SPEEDUP,
    *_group(
        "DeepBench's columns",
        *((key, title) if key == "dtype" else (key, title, ".0f") for key, title in DEEPBENCH.items()),
        ("memory_format", "memory format"),
    ),
    *_group(
        "time, ms",
        *((f"{name}_s", name.replace("_", " "), *_MS) for name in OPERATIONS.values()),
        ("total_s", "total", *_MS),
    ),
    *_group("rate", ("flops_per_s", "TFLOP/s", ".4f", 1e-12)),
    *_group(
        "configuration",
        *((f"{name}_configuration", name.replace("_", " ")) for name in OPERATIONS.values()),
        _SAME,
    ),
    *_OURS,
]
_OF_CONVOLUTIONS = _group(
    "subject", ("kind", "kind of layer"), ("batch_size", "n", ".0f"), ("memory_format", "memory format")
)
_PROBLEMS = [
    *_CONTESTANT,
    *_SPEEDUP,
    *_group(
        "time",
        ("time_s", "median, ms", *_MS),
        ("spread", "spread, %", ".1f", 100.0),
        ("samples", "samples", ".0f"),
        ("flops_per_s", "TFLOP/s", ".4f", 1e-12),
    ),
    *_group("configuration", ("configuration", "configuration"), _SAME),
    *_OURS,
    # Columns of operator metrics.
    *_group(
        "error against float64",
        ("error_l1", "sum", ".1e"),
        ("error_l2", "Euclidean", ".1e"),
        ("error_max", "largest", ".1e"),
    ),
    *_group("gradient", ("gradcheck", "gradcheck")),
    *_group("repeated runs", ("runs", "runs", ".0f"), ("distinct_results", "distinct results", ".0f")),
    *_group(
        "not finite after NaN",
        ("not_finite_by_definition", "by definition", ".0f"),
        ("not_finite", "as computed", ".0f"),
    ),
]
_OF_MODELS = _group("whole model", ("images_per_s", "images/s", ".4g"), ("kinds", "share of time by kind of layer"))
_SUMMARY = [
    *_group("tensors", ("dtype", "dtype"), ("memory_format", "memory format")),
    *_CONTESTANT,
    *_group("contestant", ("problems", "timed", ".0f")),
    *_group(
        "speedup over PyTorch, geometric mean",
        ("speedup", "speedup", ".3f"),
        ("speedup_low", "from", ".3f"),
        ("speedup_high", "to", ".3f"),
        ("busy", "timed on a busy machine", ".0f"),
        *((f"speedup_{name}", name.replace("_", " "), ".3f") for name in OPERATIONS.values()),
    ),
    *_group(
        "speedup over the best undivided, geometric mean",
        ("over_undivided", "over undivided", ".3f"),
        ("over_undivided_least", "least", ".3f"),
        ("over_undivided_most", "most", ".3f"),
        ("same", "same configuration", ".0f"),
    ),
    *_group("limit", ("over_bound", "time / bound, geometric mean", ".3f")),
    *_group("sum of times", ("total_s", "sum, ms", *_MS), ("torch_s", "PyTorch for the same, ms", *_MS)),
]


def summary_table(rows: pandas.DataFrame) -> Table:
    """Format the rows of ``summary_rows`` as a table, with a line for each contestant, policy and limit."""
    return _table("Summary", "Each contestant over all that it was timed on.", _SUMMARY, rows)


def layer_table(rows: pandas.DataFrame) -> Table:
    """Format the rows of ``layer_rows`` as a table, with DeepBench's columns before mucudnn's own."""
    if len(rows):
        timed = [f"{name}_{suffix}" for name in OPERATIONS.values() for suffix in ("configuration", "s")]
        rows = _once(rows, ["layer", *DEEPBENCH, "memory_format", *timed, "total_s"])
    return _table(
        "Layers", "Times of the operations of each layer, in DeepBench's columns, and of all together.", _LAYERS, rows
    )


def problem_table(rows: pandas.DataFrame, subject: Sequence[str]) -> Table:
    """Format the rows of ``measured`` as a table, with a line for each subject and contestant.

    subject: the columns that identify a subject, such as the layer and the operation.
    """
    is_convolution = "kind" in rows
    sizes = {*DEEPBENCH, "memory_format"} if is_convolution else set()  # The table of layers has these columns.
    columns = _group("subject", *((name, name.replace("_", " ")) for name in subject if name not in sizes))
    columns += [*_OF_CONVOLUTIONS, *_PROBLEMS] if is_convolution else [*_PROBLEMS, *_OF_MODELS]
    if not is_convolution:
        columns += _more(rows, {*ROW_COLUMNS, *subject, *(column.key for column in columns), "count"})
    columns += _group("no time", ("failure", "why there is none"))
    return _table(
        "Operations",
        "Each operation of each layer, and each contestant: medians of the samples.",
        columns,
        _once(rows.assign(samples=rows["samples_s"].map(len)), [*subject, "configuration", "time_s"]),
    )


def series_label(contestant: str, policy: str | None, limit_bytes: float) -> str:
    """Return the name of a contestant with its policy and workspace limit: ``mucudnn, power-of-two, 64 MiB``."""
    if pandas.isna(policy):
        return contestant
    limit = "no limit" if pandas.isna(limit_bytes) else format_bytes(int(limit_bytes))
    return ", ".join((contestant, *(() if policy == contestant else (policy,)), limit))


def with_series(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Add the column ``series`` to the rows: the result of ``series_label``."""
    return rows.assign(series=[*map(series_label, *(rows[name] for name in CONTESTANT))])


def _once(rows: pandas.DataFrame, keys: Sequence[str]) -> pandas.DataFrame:
    """Return one row for each configuration of a subject, with the column ``same``: the others that chose it.

    keys: the columns in which such rows are equal, the time last.
    """
    subjects = pandas.Series([str(values) for values in rows[keys].itertuples(index=False, name=None)], rows.index)
    is_repeated = rows["policy"].notna() & rows[keys[-1]].notna() & subjects.duplicated()
    names = with_series(rows[is_repeated])["series"]
    same = {subject: "; ".join(series) for subject, series in names.groupby(subjects[is_repeated], sort=False)}
    return rows[~is_repeated].assign(same=subjects[~is_repeated].map(same))


def _more(rows: pandas.DataFrame, shown: set[str]) -> list[Column]:
    """Return table columns for the keys not in ``shown``, with keys in ``_s`` shown in ms and ``_bytes`` in MiB."""
    columns: list[tuple[Any, ...]] = []
    for key in (str(name) for name in rows.columns if name not in shown):
        values, title = rows[key].dropna(), key.replace("_", " ")
        if values.map(lambda value: isinstance(value, (list, dict))).any():
            continue
        if not values.map(lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)).all():
            columns.append((key, title))
        elif key.endswith("_bytes"):
            columns.append((key, f"{title.removesuffix(' bytes')}, MiB", ".3f", 1 / _MIB))
        elif key.endswith("_s"):
            columns.append((key, f"{title.removesuffix(' s')}, ms", *_MS))
        else:
            columns.append((key, title, ".6g"))
    return _group("more", *columns)


def _table(title: str, caption: str, columns: Sequence[Column], rows: pandas.DataFrame) -> Table:
    """Return a table of the columns in which a row has a value other than the neutral one."""
    shown, cells = [], []
    for column in columns:
        values = rows[column.key].dropna().tolist() if column.key in rows else []
        if any(column.key not in _NEUTRAL or value != _NEUTRAL[column.key] for value in values):
            shown.append(column)
            cells.append([column.text(value) for value in rows[column.key].tolist()])
    return Table(title, shown, list(zip(*cells, strict=True)), caption=caption)
