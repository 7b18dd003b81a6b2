"""Functions that join the result rows of a layer's operations, as in DeepBench's tables, and summarize contestants."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import exp, log, nan
from typing import Any

import pandas

from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.speedups import Estimate, mean_speedup, speedup_of
from mucudnn.bench.pages.measured import CONTESTANT, LAYER, PUBLISHED, UNDIVIDED, has_problems, machines_of, with_layers
from mucudnn.bench.sources.published import DIVIDED_GEOMETRY, published_gains
from mucudnn.words.problem import Operation

OPERATIONS = {
    Operation.FORWARD: "forward",
    Operation.BACKWARD_DATA: "backward_inputs",
    Operation.BACKWARD_FILTER: "backward_parameters",
}  # with DeepBench's names

_Key = tuple[Any, ...]
_Operations = Mapping[str, Mapping[Hashable, Any]]  # rows by their operation


def layer_rows(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each layer, contestant, policy and workspace limit, in the order of ``rows``.

    rows: the result of ``measured``. Columns of the result: ``layer`` and those of ``LAYER`` and ``CONTESTANT``; for
    each operation, by DeepBench's names, its seconds and configuration, such as ``forward_s`` and
    ``forward_configuration``; ``total_s``; ``flops_per_s`` of the total; the total's ``speedup`` with its interval;
    ``over_bound``; ``same_as`` if all operations agree in it; the largest ``workspace_bytes`` and ``relative_error``;
    ``load``; and the published totals. NaN if one of the layer's operations is missing.
    """
    if not has_problems(rows):
        return pandas.DataFrame()
    subject, machines = ["layer", *LAYER] if "layer" in rows else [*LAYER], machines_of(rows)
    return pandas.DataFrame(
        [
            dict(zip((*subject, *CONTESTANT), (*layer, *of), strict=True)) | _layer_record(ours, every, machines)
            for layer, every in _by_layer(rows, subject).items()
            for of, ours in every.items()
        ]
    )


def _by_layer(rows: pandas.DataFrame, subject: Sequence[str]) -> Mapping[_Key, Mapping[_Key, _Operations]]:
    """Return a table's rows as nested mappings: by layer, then by contestant, policy and limit, then by operation.

    Missing values are None.
    """
    found: dict[_Key, dict[_Key, dict[str, Mapping[Hashable, Any]]]] = {}
    for row in rows.astype(object).where(rows.notna(), None).to_dict("records"):
        layer, contestant = (tuple(row[name] for name in names) for names in (subject, CONTESTANT))
        found.setdefault(layer, {}).setdefault(contestant, {})[row["operation"]] = row
    return found


def _layer_record(ours: _Operations, every: Mapping[_Key, _Operations], machines: Sequence[str]) -> dict[str, Any]:
    """Return the columns of one contestant on one layer. every: the rows of all contestants on that layer."""
    record: dict[str, Any] = {}
    for operation, name in OPERATIONS.items():
        row = ours.get(operation, {})
        record[f"{name}_s"], record[f"{name}_configuration"] = row.get("time_s"), row.get("configuration")
    is_whole = len(ours) == len({operation for rows in every.values() for operation in rows})
    total_s = _sum(ours, "time_s") if is_whole else nan
    torchs = every.get((TORCH, None, None), {})
    speedup = _ratio(torchs, ours) if is_whole and ours is not torchs else Estimate()
    same = {row.get("same_as") for row in ours.values()}
    return record | {
        "same_as": same.pop() if len(same) == 1 else None,
        "total_s": total_s,
        "flops_per_s": _sum(ours, "flops") / total_s,
        "over_bound": total_s / _sum(ours, "bound_s"),
        **speedup.columns("speedup{}"),
        **{name: _most(ours, name) for name in ("workspace_bytes", "relative_error", "load")},
        **{f"{PUBLISHED}{machine}": _sum(ours, f"{PUBLISHED}{machine}") for machine in machines},
    }


def _ratio(reference: _Operations, ours: _Operations) -> Estimate:
    """Return the speedup of ``ours`` over the reference, all operations summed; NaN if one lacks an operation."""
    names = [name for name in OPERATIONS if name in reference or name in ours]  # draws are by position
    samples = ([of[name]["samples_s"] if name in of else () for name in names] for of in (reference, ours))
    return speedup_of(*samples)


def _sum(rows: _Operations, name: str) -> float:
    """Return the sum of a column over all operations; NaN if a value is missing."""
    values = [row[name] for row in rows.values()]
    return nan if None in values else float(sum(values))


def _most(rows: _Operations, name: str) -> float:
    return max((row[name] for row in rows.values() if row[name] is not None), default=nan)


def summary_rows(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return a row for each timed combination of contestant, policy and limit. rows: the result of ``measured``.

    Columns: those of ``CONTESTANT``; ``problems``, the number of timed problems; ``speedup`` over torch, a geometric
    mean, with its interval; for convolutions also the speedup of each operation, such as ``speedup_forward``, and the
    geometric mean ``over_bound``; ``total_s``, the sum of times weighted by occurrences, and ``torch_s``, torch's sum
    for the same problems.
    """
    if rows.empty:
        return pandas.DataFrame()
    timed = rows.dropna(subset=["time_s"])
    torchs = timed[timed["contestant"] == TORCH].drop_duplicates("turns").set_index("turns")
    timed = timed.assign(
        torch_s=timed["turns"].map(torchs["time_s"]), torch_samples_s=timed["turns"].map(torchs["samples_s"])
    )
    groups = timed.groupby(list(CONTESTANT), dropna=False, sort=False)
    return pandas.DataFrame([dict(zip(CONTESTANT, key, strict=True)) | _summary(group) for key, group in groups])


def _summary(group: pandas.DataFrame) -> dict[str, Any]:
    record: dict[str, Any] = {
        "problems": len(group),
        **_mean_speedup(group).columns("speedup{}"),
        "total_s": float((group["count"] * group["time_s"]).sum()),
        "torch_s": float((group["count"] * group["torch_s"]).sum(skipna=False)),
    }
    if has_problems(group):
        by_operation = {name: group[group["operation"] == name]["speedup"] for name in OPERATIONS}
        record |= {f"speedup_{OPERATIONS[name]}": _geometric_mean(values) for name, values in by_operation.items()}
        record["over_bound"] = _geometric_mean(group["over_bound"])
    return record


def _mean_speedup(group: pandas.DataFrame) -> Estimate:
    """Return the geometric mean of the rows' speedups over torch; torch's own rows have no speedup."""
    of = group.dropna(subset=["speedup"])
    return mean_speedup([*zip(of["torch_samples_s"], of["samples_s"], strict=True)])


def _geometric_mean(values: pandas.Series[float]) -> float:
    logarithms = [log(value) for value in values.dropna()]
    return exp(sum(logarithms) / len(logarithms)) if logarithms else nan


def gains(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Return how much faster dividing mini-batches is than the best undivided algorithm under the same limit.

    rows: the result of ``measured``. The result has a row for each layer, policy and limit, with the columns ``layer``,
    those of ``LAYER``, ``policy``, ``limit_bytes``, and ``gain``, the undivided algorithms' sum of medians over
    mucudnn's, with its interval ``gain_low`` to ``gain_high`` (see ``speedup_of``). NaN if one of the two was timed on
    fewer operations.
    """
    if not has_problems(rows):
        return pandas.DataFrame()
    found, names = [], ["layer", *LAYER, "policy", "limit_bytes"]
    for layer, every in _by_layer(with_layers(rows.dropna(subset=["policy"])), names[:-2]).items():
        undivided = {limit: of for (contestant, _, limit), of in every.items() if contestant == UNDIVIDED}
        for (contestant, policy, limit), ours in every.items():
            if contestant == "mucudnn" and limit in undivided:
                gain = _ratio(undivided[limit], ours).columns("gain{}")
                found.append(dict(zip(names, (*layer, policy, limit), strict=True)) | gain)
    return pandas.DataFrame(found)


def published_gains_of(layers: pandas.DataFrame) -> pandas.DataFrame:
    """Return the gains that the paper's authors published for these layers: ``layer``, and a column for each limit.

    layers: the result of ``gains``. Layers match by geometry, with any mini-batch; a layer without published gains has
    no row.
    """
    ours = layers.drop_duplicates("layer")[["layer", *DIVIDED_GEOMETRY]]
    return ours.merge(published_gains(), on=list(DIVIDED_GEOMETRY)).drop(columns=list(DIVIDED_GEOMETRY))
