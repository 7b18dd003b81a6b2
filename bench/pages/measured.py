"""The numbers that reports show for each row of a result folder: functions from data frames to data frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import nan
from typing import Any

import numpy as np
import pandas

from mucudnn.bench.contests.bounds import MachineLimits, kind_of_layer
from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import PROBLEM_COLUMNS, problem_of
from mucudnn.bench.folders.speedups import Estimate, overhead_of, speedup_of
from mucudnn.bench.sources.published import GEOMETRY, published_times

PUBLISHED = "published "  # prefix of columns with DeepBench's published times
UNDIVIDED = "undivided"  # name of the contestant and of its policy
CONTESTANT = ("contestant", "policy", "limit_bytes")
LAYER = tuple(name for name in PROBLEM_COLUMNS if name != "operation")
_NUMBERS = ("limit_bytes", "workspace_bytes", "relative_error", "load", "count")
_TEXTS = ("policy", "configuration", "failure")
# Columns of ``bench metrics`` only: samples of the algorithm without its module, and numbers.
_ALONE = "alone_samples_s"
_METRICS = ("error_l1", "error_l2", "error_max", "gradient_error", "runs", "distinct_results")


def measured(folder: ResultFolder) -> pandas.DataFrame:
    """Return the rows of a result folder, in their order there, with the columns that reports show.

    Columns beside those of the folder: ``speedup``, ``speedup_low``, ``speedup_high`` over torch timed in the same
    turns; ``spread``, the interquartile range over the median. For convolutions also ``kind``; ``flops``, of the direct
    method; ``bound_s``, a lower bound by the machine's rates, and ``over_bound``, the time over that bound;
    ``flops_per_s``; ``flops_per_byte``, of the least bytes; ``same_as``, ``UNDIVIDED`` if the row has the same
    configuration as the undivided contestant; and for each machine of DeepBench's published times a column of seconds,
    named ``PUBLISHED`` machine. For operator metrics also ``samples_per_s``, and ``overhead_s``, ``overhead_low_s``,
    ``overhead_high_s``, the time of a call through a module beyond the algorithm alone. For whole models
    ``images_per_s``, and ``kinds``, the share of each kind of layer in the time, as text. Unknown values are NaN.
    """
    rows = _with_known_types(folder.rows)
    rows = _with_speedups(rows)
    rows["spread"] = [_spread(samples) for samples in rows["samples_s"]]
    if _ALONE in rows:
        rows = _with_metrics(rows)
    if not has_problems(rows):
        return _with_models(rows)
    return _with_published(_with_bounds(_with_same(rows), folder.header.limits))


def has_problems(rows: pandas.DataFrame) -> bool:
    """Return whether the rows describe convolutions, which is so if they have all columns of a convolution problem."""
    if not len(rows) or not set(PROBLEM_COLUMNS) <= set(rows.columns):
        return False
    return bool(rows[list(PROBLEM_COLUMNS)].notna().all(axis=None))


def with_layers(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return convolution rows whose column ``layer`` is text: the layer's name, or its kind if layers have no names."""
    return rows.assign(layer=[str(name) for name in (rows["layer"] if "layer" in rows else rows["kind"])])


def _with_known_types(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a copy of the rows that has every numeric and text column, each converted to its type."""
    rows = rows.reindex(columns=[*rows.columns, *(name for name in (*_NUMBERS, *_TEXTS) if name not in rows)])
    texts: dict[str, Any] = {name: [None if value != value else value for value in rows[name]] for name in _TEXTS}
    rows = rows.astype(dict.fromkeys(_NUMBERS, float)).assign(**texts)
    return rows.assign(count=rows["count"].fillna(1))


def _with_speedups(rows: pandas.DataFrame) -> pandas.DataFrame:
    torchs = rows[rows["contestant"] == TORCH]
    by_turns = dict(zip(torchs["turns"], torchs["samples_s"], strict=True))
    found = [
        Estimate() if name == TORCH else speedup_of([by_turns.get(turns, [])], [samples])
        for name, turns, samples in zip(rows["contestant"], rows["turns"], rows["samples_s"], strict=True)
    ]
    return _with_columns(rows, (one.columns("speedup{}") for one in found))


def _with_columns(rows: pandas.DataFrame, records: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    return rows.assign(**pandas.DataFrame(list(records), index=rows.index))


def _with_same(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Add the column ``same_as``: ``UNDIVIDED`` where the undivided row under that limit has the same configuration."""
    keys = ["turns", "memory_format", "limit_bytes", "configuration"]
    undivided = rows[rows["contestant"] == UNDIVIDED].dropna(subset=["configuration"])[keys]
    found = rows[keys].merge(undivided.drop_duplicates().assign(same_as=UNDIVIDED), how="left")["same_as"]
    is_other = rows["policy"].notna() & (rows["contestant"] != UNDIVIDED)
    return rows.assign(same_as=found.set_axis(rows.index).where(is_other))


def _with_models(rows: pandas.DataFrame) -> pandas.DataFrame:
    if {"network", "batch_size"} <= set(rows.columns):
        rows = rows.assign(images_per_s=rows["batch_size"] / rows["time_s"])
    if "kinds_s" in rows:
        rows = rows.assign(kinds=rows["kinds_s"].map(_kinds))
    return rows


def _kinds(kinds_s: object) -> str | None:
    from mucudnn.bench.contests.step_parts import shares  # imported only here, since it imports torch

    if not isinstance(kinds_s, dict):
        return None
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shares(kinds_s).items()) or None


def _spread(samples: list[float]) -> float:
    if len(samples) < 2:
        return nan
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75))
    return float((high - low) / middle)


def _with_metrics(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Add samples per second and the overheads of calls to the rows, and convert columns of metrics to numbers."""
    alone_s = [value if isinstance(value, list) else [] for value in rows[_ALONE]]
    found = (overhead_of(call, alone) for call, alone in zip(rows["samples_s"], alone_s, strict=True))
    rows = rows.astype({name: float for name in _METRICS if name in rows})
    rows = rows.assign(samples_per_s=rows["batch_size"] / rows["time_s"])
    return _with_columns(rows, (one.columns("overhead{}_s") for one in found))


def _with_bounds(rows: pandas.DataFrame, limits: Mapping[str, MachineLimits]) -> pandas.DataFrame:
    rows = _with_columns(rows, (_bounds(row, limits) for row in rows[list(PROBLEM_COLUMNS)].to_dict("records")))
    return rows.assign(over_bound=rows["time_s"] / rows["bound_s"], flops_per_s=rows["flops"] / rows["time_s"])


def _bounds(row: Mapping[Any, Any], limits: Mapping[str, MachineLimits]) -> dict[str, Any]:
    problem, n = problem_of(row), int(row["batch_size"])
    flops, limit = problem.flops(n), limits.get(problem.dtype, MachineLimits())
    return {
        "kind": kind_of_layer(problem),
        "flops": float(flops),
        "flops_per_byte": flops / problem.least_bytes(n),
        "bound_s": limit.bound_s(problem, n) if limit.are_known else nan,
    }


def _with_published(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Add a column for each machine with published times of the row's geometry, mini-batch and operation.

    Rows with dilation or groups get no value, since the published times are of ordinary convolutions.
    """
    times = published_times()
    times = times.pivot(index=[*GEOMETRY, "operation"], columns="machine", values="time_s").add_prefix(PUBLISHED)
    plain = (rows[["dilation_h", "dilation_w", "groups"]] == 1).all(axis=1)
    keys = rows[plain].rename(columns={"batch_size": "n"})[[*GEOMETRY, "operation"]]
    found = times.reindex(pandas.MultiIndex.from_frame(keys)).set_axis(keys.index).dropna(axis=1, how="all")
    return rows.join(found)


def machines_of(rows: pandas.DataFrame) -> list[str]:
    """Return the machines that have published times for at least one of the rows."""
    return [str(name).removeprefix(PUBLISHED) for name in rows.columns if str(name).startswith(PUBLISHED)]


def unmatched_published(rows: pandas.DataFrame) -> tuple[int, int]:
    """Return two numbers: of published geometries that have no row in this table, and of all published geometries."""
    every = {tuple(map(int, key)) for key in published_times()[list(GEOMETRY)].drop_duplicates().to_numpy()}
    if not has_problems(rows):
        return len(every), len(every)
    have = rows.rename(columns={"batch_size": "n"})[list(GEOMETRY)].drop_duplicates().to_numpy()
    return len(every - {tuple(map(int, key)) for key in have}), len(every)
