"""Puts the operations of a layer side by side, as DeepBench's own tables have them, and sums up contestants."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import exp, log, nan
from typing import Any

import pandas

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.folders.speedups import Speedup, speedup_of
from mucudnn.bench.pages.measured import CONTESTANT, LAYER, PUBLISHED, has_problems, machines_of
from mucudnn.words.problem import Operation

OPERATIONS = {
    Operation.FORWARD: "forward",
    Operation.BACKWARD_DATA: "backward_inputs",
    Operation.BACKWARD_FILTER: "backward_parameters",
}  # with DeepBench's names

_Row = Mapping[Hashable, Any]


def layer_rows(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each layer, contestant, policy and limit, from what ``measured`` returned; in its order.

    Columns: ``layer`` and those of ``LAYER`` and ``CONTESTANT``; for each of DeepBench's names of operations its time
    in seconds, as ``forward_s``, and ``forward_configuration``; ``total_s``; ``flops_per_s`` of the total; the total's
    ``speedup`` with its interval; ``over_bound``; the largest ``workspace_bytes`` and ``relative_error``; ``load``; and
    the published totals. NaN where one of the operations that the layer was measured in is missing.
    """
    if not has_problems(rows):
        return pandas.DataFrame()
    subject = ["layer", *LAYER] if "layer" in rows else [*LAYER]
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[_Row]]] = {}
    for row in rows.astype(object).where(rows.notna(), None).to_dict("records"):
        layer = groups.setdefault(tuple(row[name] for name in subject), {})
        layer.setdefault(tuple(row[name] for name in CONTESTANT), []).append(row)
    machines = machines_of(rows)
    records = [
        {
            **dict(zip((*subject, *CONTESTANT), (*layer, *contestant), strict=True)),
            **_layer_record(ours, every, machines),
        }
        for layer, every in groups.items()
        for contestant, ours in every.items()
    ]
    return pandas.DataFrame(records)


def _layer_record(
    ours: list[_Row], every: Mapping[tuple[Any, ...], list[_Row]], machines: Sequence[str]
) -> dict[str, Any]:
    """Return what one contestant did on one layer; every: all contestants' rows."""
    by_operation = {row["operation"]: row for row in ours}
    record: dict[str, Any] = {}
    for operation, name in OPERATIONS.items():
        row = by_operation.get(operation, {})
        record[f"{name}_s"], record[f"{name}_configuration"] = row.get("time_s"), row.get("configuration")
    is_whole = len(by_operation) == len({row["operation"] for rows in every.values() for row in rows})
    total_s = _sum(ours, "time_s") if is_whole else nan
    torchs = {row["operation"]: row["samples_s"] for row in every.get((TORCH, None, None), ())}
    is_compared = is_whole and ours[0]["contestant"] != TORCH
    speedup = _speedup(by_operation, torchs) if is_compared else Speedup()
    return record | {
        "total_s": total_s,
        "flops_per_s": _sum(ours, "flops") / total_s,
        "over_bound": total_s / _sum(ours, "bound_s"),
        "speedup": speedup.ratio,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        **{name: _most(ours, name) for name in ("workspace_bytes", "relative_error", "load")},
        **{f"{PUBLISHED}{machine}": _sum(ours, f"{PUBLISHED}{machine}") for machine in machines},
    }


def _speedup(ours: Mapping[str, _Row], torchs: Mapping[str, Sequence[float]]) -> Speedup:
    """Return the speedup of all operations together, in one order, so that each has its draws."""
    names = [name for name in OPERATIONS if name in ours]
    return speedup_of([torchs.get(name, ()) for name in names], [ours[name]["samples_s"] for name in names])


def _sum(rows: Sequence[_Row], name: str) -> float:
    """Return the sum; NaN where one is missing."""
    values = [row[name] for row in rows]
    return nan if None in values else float(sum(values))


def _most(rows: Sequence[_Row], name: str) -> float:
    return max((row[name] for row in rows if row[name] is not None), default=nan)


def summary_rows(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each contestant, policy and limit that was timed, from what ``measured`` returned.

    Columns: those of ``CONTESTANT``; ``problems``, how many were timed; ``speedup`` over torch, the geometric mean,
    and of convolutions that of each operation, as ``speedup_forward``, and ``over_bound``, a geometric mean, too;
    ``total_s``, the sum of times, each as often as its network has it, and ``torch_s``, torch's for the same problems.
    """
    if rows.empty:
        return pandas.DataFrame()
    torchs = rows[rows["contestant"] == TORCH].dropna(subset=["time_s"])
    torch_s = torchs.drop_duplicates("turns").set_index("turns")["time_s"]
    timed = rows.dropna(subset=["time_s"])
    timed = timed.assign(torch_s=timed["turns"].map(torch_s))
    groups = timed.groupby(list(CONTESTANT), dropna=False, sort=False)
    return pandas.DataFrame([dict(zip(CONTESTANT, key, strict=True)) | _summary(group) for key, group in groups])


def _summary(group: pandas.DataFrame) -> dict[str, Any]:
    record: dict[str, Any] = {
        "problems": len(group),
        "speedup": _geometric_mean(group["speedup"]),
        "total_s": float((group["count"] * group["time_s"]).sum()),
        "torch_s": float((group["count"] * group["torch_s"]).sum(skipna=False)),
    }
    if has_problems(group):
        by_operation = {name: group[group["operation"] == name]["speedup"] for name in OPERATIONS}
        record |= {f"speedup_{OPERATIONS[name]}": _geometric_mean(values) for name, values in by_operation.items()}
        record["over_bound"] = _geometric_mean(group["over_bound"])
    return record


def _geometric_mean(values: pandas.Series[float]) -> float:
    logarithms = [log(value) for value in values.dropna()]
    return exp(sum(logarithms) / len(logarithms)) if logarithms else nan
