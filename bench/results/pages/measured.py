"""The numbers that reports show for each row of a result folder, for each layer and for each contestant.

Functions from data frames to data frames. The rows of a layer's operations are joined as in DeepBench's tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import nan
from statistics import median
from typing import Any

import numpy as np
import pandas

from mucudnn.bench.results.bounds import MachineLimits, kind_of_layer, shares
from mucudnn.bench.results.reading import CONTESTANT, PROBLEM_COLUMNS, ResultFolder, problem_of, with_time
from mucudnn.bench.results.statistics import Estimate, mean_speedup, speedup_of
from mucudnn.bench.results.variants import TORCH
from mucudnn.bench.sources.published import DIVIDED_GEOMETRY, published_gains
from mucudnn.core.config import Config
from mucudnn.core.problem import Operation
from mucudnn.core.records import BUSY, allowed
from mucudnn.core.statistics import spread
from mucudnn.solver.front import desirable_sets
from mucudnn.solver.reuse import micro_batch_sizes

UNDIVIDED = "undivided"  # name of both the contestant and its policy

LAYER = tuple(name for name in PROBLEM_COLUMNS if name != "operation")
_NUMBERS = ("limit_bytes", "workspace_bytes", "relative_error", "load", "count")
_TEXTS = ("policy", "configuration", "failure")
# Numeric columns of ``bench metrics`` only.
_METRICS = ("error_l1", "error_l2", "error_max", "runs", "distinct_results", "not_finite", "not_finite_by_definition")


def measured(folder: ResultFolder) -> pandas.DataFrame:
    """Return the rows of a result folder in their order, with the additional columns that reports show.

    Additional columns: ``torch_samples_s``, torch's samples of the same subject and rounds; ``speedup``,
    ``speedup_low``, ``speedup_high`` over these; ``spread``, the interquartile range over the median. For convolutions
    also ``kind``; ``flops``, of the direct method; ``bound_s``, a lower bound by the machine's peak rates, and
    ``over_bound``, the time over that bound; ``flops_per_s``; ``flops_per_byte``, with each tensor moved once;
    ``over_undivided``, of mucudnn, the time of the undivided contestant under the same limit over the row's, and
    ``same_as``, ``UNDIVIDED`` if both have the same configuration. For whole models ``images_per_s``, and ``kinds``,
    the share of each kind of layer in the time, as text. Unknown values are NaN.
    """
    rows = folder.rows
    rows = rows.reindex(columns=[*rows.columns, *(name for name in (*_NUMBERS, *_TEXTS) if name not in rows)])
    rows = rows.astype({name: float for name in (*_NUMBERS, *_METRICS) if name in rows})
    for name in _TEXTS:
        rows[name] = pandas.Series(
            [None if value != value else value for value in rows[name]], rows.index, dtype=object
        )
    rows["count"] = rows["count"].fillna(1)

    # Subjects such as the memory formats of a layer are timed together, so that the subject is a part of the key.
    keys = [*folder.header.subject_columns, "turns"]
    torchs = rows[rows["contestant"] == TORCH].drop_duplicates(keys)[[*keys, "samples_s"]]
    joined = rows.merge(torchs.rename(columns={"samples_s": "torch_samples_s"}), how="left", on=keys)
    samples = [value if isinstance(value, list) else [] for value in joined["torch_samples_s"]]
    rows = rows.assign(torch_samples_s=pandas.Series(samples, rows.index, dtype=object))
    speedups = [
        (Estimate() if name == TORCH else speedup_of([torch_s], [times_s])).columns("speedup{}")
        for name, torch_s, times_s in zip(rows["contestant"], samples, rows["samples_s"], strict=True)
    ]
    rows = rows.join(pandas.DataFrame(speedups, index=rows.index))
    rows["spread"] = [spread(samples) if len(samples) > 1 else nan for samples in rows["samples_s"]]
    if has_problems(rows):
        return _with_bounds(_with_undivided(rows), folder.header.limits)
    if {"network", "batch_size"} <= set(rows.columns):
        rows = rows.assign(images_per_s=rows["batch_size"] / rows["time_s"])
    if "kinds_s" in rows:
        rows["kinds"] = [_kinds_in_words(kinds_s) for kinds_s in rows["kinds_s"]]
    return rows


def _kinds_in_words(kinds_s: Any) -> str | None:
    """Return the share of each kind of layer in the time; None where it is unknown."""
    if not isinstance(kinds_s, dict):
        return None
    return ", ".join(f"{kind} {share:.0%}" for kind, share in shares(kinds_s).items()) or None


def has_problems(rows: pandas.DataFrame) -> bool:
    """Return whether the rows have a layer and all columns of a convolution problem."""
    has_columns = {"layer", *PROBLEM_COLUMNS} <= set(rows.columns)
    return bool(len(rows) and has_columns and rows[list(PROBLEM_COLUMNS)].notna().all(axis=None))


def _with_undivided(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Add ``over_undivided`` and ``same_as`` to the rows of mucudnn, by the undivided row under the same limit."""
    keys = ["turns", "dtype", "memory_format", "limit_bytes"]
    undivided = rows[rows["contestant"] == UNDIVIDED][[*keys, "time_s", "configuration"]].drop_duplicates(keys)
    undivided = rows[keys].merge(undivided, how="left", on=keys).set_axis(rows.index)
    is_ours = rows["contestant"] == "mucudnn"
    is_same = is_ours & rows["configuration"].notna() & (rows["configuration"] == undivided["configuration"])
    same = pandas.Series([UNDIVIDED if same else None for same in is_same], rows.index, dtype=object)
    return rows.assign(over_undivided=(undivided["time_s"] / rows["time_s"]).where(is_ours), same_as=same)


def _with_bounds(rows: pandas.DataFrame, limits: Mapping[str, MachineLimits]) -> pandas.DataFrame:
    records = []
    for row in rows[list(PROBLEM_COLUMNS)].to_dict("records"):
        problem, n = problem_of({str(name): value for name, value in row.items()}), int(row["batch_size"])
        flops, limit = problem.flops(n), limits.get(problem.dtype, MachineLimits())
        records.append(
            {
                "kind": kind_of_layer(problem),
                "flops": float(flops),
                "flops_per_byte": flops / problem.least_bytes(n),
                "bound_s": limit.bound_s(problem, n) if limit.are_known else nan,
            }
        )
    rows = rows.assign(**pandas.DataFrame(records, index=rows.index))
    return rows.assign(over_bound=rows["time_s"] / rows["bound_s"], flops_per_s=rows["flops"] / rows["time_s"])


OPERATIONS = {
    Operation.FORWARD: "forward",
    Operation.BACKWARD_DATA: "backward_inputs",
    Operation.BACKWARD_FILTER: "backward_parameters",
}  # by the names that DeepBench uses

_Key = tuple[Any, ...]
_Operations = Mapping[str, Mapping[Hashable, Any]]  # rows by operation


def layer_rows(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each layer, contestant, policy and workspace limit, in the order of ``rows``.

    rows: the result of ``measured``.

    Columns of the result: ``layer`` and those of ``LAYER`` and ``CONTESTANT``; for each operation, by DeepBench's
    names, its seconds and configuration, such as ``forward_s`` and ``forward_configuration``; ``total_s``;
    ``flops_per_s`` and ``speedup`` of the total, the latter with its interval; ``over_bound``; ``same_as``, if all
    operations have the same value; the largest ``workspace_bytes`` and ``relative_error``; and ``load``. Values are NaN
    if one of the layer's operations is missing.
    """
    if not has_problems(rows):
        return pandas.DataFrame()
    records, names = [], ["layer", *LAYER]
    for layer, contestants in _by_layer(rows, names).items():
        most = len({operation for operations in contestants.values() for operation in operations})
        for contestant, operations in contestants.items():
            reference = {} if contestant[0] == TORCH else contestants.get((TORCH, None, None), {})
            records.append(
                {
                    **dict(zip((*names, *CONTESTANT), (*layer, *contestant), strict=True)),
                    **_layer_record(operations, reference, is_whole=len(operations) == most),
                }
            )
    return pandas.DataFrame(records)


def _by_layer(rows: pandas.DataFrame, subject: Sequence[str]) -> Mapping[_Key, Mapping[_Key, _Operations]]:
    """Group rows in nested mappings: by layer, then by contestant, policy and limit, then by operation.

    Missing values are None.
    """
    layers: dict[_Key, dict[_Key, dict[str, Mapping[Hashable, Any]]]] = {}
    for row in rows.astype(object).where(rows.notna(), None).to_dict("records"):
        layer, contestant = (tuple(row[name] for name in names) for names in (subject, CONTESTANT))
        layers.setdefault(layer, {}).setdefault(contestant, {})[row["operation"]] = row
    return layers


def _layer_record(operations: _Operations, torchs: _Operations, *, is_whole: bool) -> dict[str, Any]:
    """Return the row of one contestant on one layer.

    torchs: the operations of torch, with which they are compared.
    is_whole: whether they are all operations of the layer.
    """
    record: dict[str, Any] = {}
    for operation, name in OPERATIONS.items():
        row = operations.get(operation, {})
        record[f"{name}_s"], record[f"{name}_configuration"] = row.get("time_s"), row.get("configuration")
    total_s = _sum(operations, "time_s") if is_whole else nan
    speedup = _ratio(torchs, operations) if is_whole and torchs else Estimate()
    same = {row.get("same_as") for row in operations.values()}
    return record | {
        "same_as": same.pop() if len(same) == 1 else None,
        "total_s": total_s,
        "flops_per_s": _sum(operations, "flops") / total_s,
        "over_bound": total_s / _sum(operations, "bound_s"),
        **speedup.columns("speedup{}"),
        **{name: _most(operations, name) for name in ("workspace_bytes", "relative_error", "load")},
    }


def _ratio(reference: _Operations, operations: _Operations) -> Estimate:
    """Return the speedup over the reference, summed over operations; NaN if one lacks an operation."""
    # The position selects the random draws.
    names = [name for name in OPERATIONS if name in reference or name in operations]
    return speedup_of(
        [reference[name]["samples_s"] if name in reference else () for name in names],
        [operations[name]["samples_s"] if name in operations else () for name in names],
    )


def _sum(rows: _Operations, name: str) -> float:
    """Return the sum of a column over all operations; NaN if a value is missing."""
    return float(sum(nan if row[name] is None else row[name] for row in rows.values()))


def _most(rows: _Operations, name: str) -> float:
    return max((row[name] for row in rows.values() if row[name] is not None), default=nan)


def summary_rows(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each timed combination of contestant, policy and limit.

    rows: the result of ``measured``.

    Convolutions have rows of their own in each dtype and memory format. Columns: those of ``CONTESTANT``; ``problems``,
    the number of timed problems; ``speedup`` over torch, a geometric mean, with its interval; for convolutions also the
    speedup of each operation, such as ``speedup_forward``, the geometric means ``over_bound`` and ``over_undivided``,
    the latter with its extremes ``_least`` and ``_most``, and ``same``, the number of configurations that are the
    undivided ones; ``total_s``, the sum of times multiplied by the number of occurrences, and ``torch_s``, torch's sum
    for the same problems; and ``busy``, the number of problems timed on a busy machine.
    """
    if rows.empty:
        return pandas.DataFrame()
    timed = rows.dropna(subset=["time_s"])
    timed = timed.assign(torch_s=[median(samples) if samples else nan for samples in timed["torch_samples_s"]])
    keys = [*(("dtype", "memory_format") if has_problems(timed) else ()), *CONTESTANT]
    return pandas.DataFrame(
        [
            dict(zip(keys, key, strict=True)) | _summary(group)
            for key, group in timed.groupby(keys, dropna=False, sort=False)
        ]
    )


def _summary(group: pandas.DataFrame) -> dict[str, Any]:
    compared = group.dropna(subset=["speedup"])  # not torch's own rows
    speedup = mean_speedup([*zip(compared["torch_samples_s"], compared["samples_s"], strict=True)])
    record: dict[str, Any] = {
        "problems": len(group),
        **speedup.columns("speedup{}"),
        "total_s": float((group["count"] * group["time_s"]).sum()),
        "torch_s": float((group["count"] * group["torch_s"]).sum(skipna=False)),
        "busy": int((group["load"] > BUSY).sum()),
    }
    if has_problems(group):
        for operation, name in OPERATIONS.items():
            record[f"speedup_{name}"] = _geometric_mean(group[group["operation"] == operation]["speedup"])
        record |= {name: _geometric_mean(group[name]) for name in ("over_bound", "over_undivided")}
        gains, same = group["over_undivided"], int(group["same_as"].notna().sum())
        record |= {"over_undivided_least": gains.min(), "over_undivided_most": gains.max(), "same": same or None}
    return record


def _geometric_mean(values: pandas.Series[float]) -> float:
    """Return the geometric mean of the known values; NaN if there are none."""
    return float(np.exp(np.log(values.dropna()).mean()))


def gains(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return the speedup of divided mini-batches over the best undivided algorithm under the same limit.

    rows: of convolutions, from ``measured``.

    The result has a row for each layer, policy and limit; columns: ``layer``,
    those of ``LAYER``, ``policy``, ``limit_bytes``; ``gain``, the undivided algorithms' sum of medians over mucudnn's,
    with its interval ``gain_low`` to ``gain_high`` (see ``speedup_of``), NaN if one of the two was timed on fewer
    operations; and ``is_same``: whether all operations run the configuration of the undivided.
    """
    records, names = [], ["layer", *LAYER, "policy", "limit_bytes"]
    for layer, contestants in _by_layer(rows.dropna(subset=["policy"]), names[:-2]).items():
        for (contestant, policy, limit), operations in contestants.items():
            undivided = contestants.get((UNDIVIDED, UNDIVIDED, limit))
            if contestant == "mucudnn" and undivided is not None:
                records.append(
                    {
                        **dict(zip(names, (*layer, policy, limit), strict=True)),
                        **_ratio(undivided, operations).columns("gain{}"),
                        "is_same": all(row["same_as"] == UNDIVIDED for row in operations.values()),
                    }
                )
    return pandas.DataFrame(records)


def published_gains_of(layers: pandas.DataFrame) -> pandas.DataFrame:
    """Return the speedups that the paper reports for these layers: ``layer``, and a column for each limit.

    layers: the result of ``gains``. Layers match by geometry, with any mini-batch; a layer that the paper does not
    report has no row.
    """
    ours = layers.drop_duplicates("layer")[["layer", *DIVIDED_GEOMETRY]]
    return ours.merge(published_gains(), on=list(DIVIDED_GEOMETRY)).drop(columns=list(DIVIDED_GEOMETRY))


@dataclass(frozen=True, slots=True)
class TunedOperation:
    """A tuned operation of a layer: the measurements with errors within the bound, and its desirable set."""

    name: str
    batch_size: int
    allowed: pandas.DataFrame
    desirable: pandas.DataFrame


def tuned_operations(folder: ResultFolder) -> list[TunedOperation]:
    """Return the tuned operations, with what was measured by the run's algorithms and policies, longest time first.

    The name of one has its layer, its operation, and its memory format unless that is contiguous. The time is torch's.
    """
    settings, operations = folder.header.settings, list[TunedOperation]()
    torchs = [with_time(line) for line in folder.lines if folder.measurements and line["contestant"] == TORCH]
    for line in sorted(torchs, key=lambda line: line["time_s"] or 0.0, reverse=True):
        # What the run could choose from.
        problem, n = problem_of(line), line["batch_size"]
        config = Config(**{name: settings[name] for name in ("algorithms", "max_relative_error")})
        bound = config.error_bound(problem.dtype, folder.header.environment.numerics)
        sizes = {size for policy in settings["policy"] for size in micro_batch_sizes(policy, n)}
        usable = [
            measurement
            for measurement in allowed(folder.measurements.get(problem, ()), bound)
            if measurement.micro_config.micro_batch_size in sizes and config.allows(measurement.micro_config.algorithm)
        ]
        if usable:
            names = [line["layer"], line["operation"], line["memory_format"]]
            points = [(c.time_s, c.workspace_bytes) for c in desirable_sets(usable, n).of(n)]
            operations.append(
                TunedOperation(
                    " ".join(name for name in names if name != "contiguous"),
                    n,
                    pandas.DataFrame([asdict(m.micro_config) | asdict(m) for m in usable]),
                    pandas.DataFrame(points, columns=["time_s", "workspace_bytes"]),
                )
            )
    return operations
