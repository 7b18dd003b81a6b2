"""Reports the configurations chosen for a network's layers: tables for people, JSON objects for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import mucudnn
from mucudnn.bench.results.writing import config_record
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.core.answers import TunedProblem, left_out_in_words
from mucudnn.core.tables import Table, memory_bound, milliseconds, new_table, ratio, short_name, speedup_cell
from mucudnn.core.values import format_bytes, format_seconds
from mucudnn.optimizing.keeping import Keeping
from mucudnn.solver.division import CurvePoint, budget_curve, limit_curve
from mucudnn.solver.front import desirable_sets
from mucudnn.tuning.choose import baseline_or_declared, is_timed

FORMAT_VERSION = 1  # of JSON objects of tunings, increased when a key is removed or changes its meaning


def tuning_table(tuning: TableTuning) -> Table:
    """Return a table of torch's own choice and ours for each operation: time, speedup, workspace, error, and totals.

    If needed, more columns count candidates left out by a time limit, and explain choices slower than the baseline.
    """
    tunings = [row.tuned for row in tuning.rows]
    columns = {"not measured": [*map(_unmeasured, tunings)], "why slower": [*map(_why_slower, tunings)]}
    more = {title: cells for title, cells in columns.items() if any(cells)}
    totals = (*_against_torch(tuning), format_bytes(tuning.workspace_bytes)) if tunings else ("", "", "", "")
    printed = new_table(
        f"{tuning.source}, {memory_bound(tuning.config)}",
        ("layer", "operation", "configuration"),
        ("count", "PyTorch ms", "chosen ms", "speedup", "workspace", "rel. error", *more),
        footer=("total", "", "", "", *totals, "", *("" for _ in more)),
    )
    for row, *cells in zip(tuning.rows, *more.values(), strict=True):
        tuned = row.tuned
        printed.add_row(
            short_name(row.names),
            str(tuned.problem.operation),
            str(tuned.configuration),
            str(row.count),
            *_against_torch(tuned),
            format_bytes(tuned.configuration.workspace_bytes),
            "" if tuned.relative_error is None else f"{tuned.relative_error:.1e}",
            *cells,
        )
    printed.caption = left_out_in_words(tunings)
    return printed


def account_in_words(tuning: TableTuning) -> str:
    """Summarize in one line the time and workspace that the solver predicts.

    The tuning has one workspace budget for all problems, or a limit for each. Predicted times are sums of separately
    measured parts, so they differ from the total in the report's table, which is measured on complete calls.
    """
    if tuning.division is not None:
        return str(tuning.division)
    accounts = [(row.count, row.tuned.account) for row in tuning.rows if row.tuned.account is not None]
    predicted_s = sum(count * account.objective_s for count, account in accounts)
    return (
        f"{len(accounts)} problems, each solved under its own limit: predicted total {format_seconds(predicted_s)}, "
        "the least that the measured parts allow (the table's total is of whole runs, where there are any); "
        f"{sum(account.front_size for _, account in accounts)} desirable configurations "
        f"from {sum(account.measurements for _, account in accounts)} measurements, "
        f"{format_seconds(sum(account.solve_time_s for _, account in accounts))}"
    )


def _unmeasured(tuned: TunedProblem) -> str:
    """Return how many candidates a time limit left unmeasured, or an empty string if there are none."""
    unmeasured = len(tuned.left_out)
    return f"{unmeasured} of {unmeasured + len(tuned.measurements)}" if unmeasured else ""


def _why_slower(tuned: TunedProblem) -> str:
    """Return why PyTorch's faster algorithm was not chosen, or an empty string if PyTorch's is not faster."""
    if tuned.speedup is None or tuned.speedup >= 1:
        return ""
    if tuned.barred is not None:
        return "PyTorch's own is barred"
    needed = baseline_or_declared(tuned.measurements, tuned.batch_size, None).workspace_bytes
    if tuned.limit_bytes is None or needed <= tuned.limit_bytes:
        return ""
    return f"PyTorch needs {format_bytes(needed)}, over the limit"


def _against_torch(tuned: TunedProblem | TableTuning) -> tuple[str, str, str]:
    """Return the cells for torch's time, our time and the speedup; torch's and the speedup are blank if unknown."""
    torch_s, is_least = tuned.least_baseline_s, tuned.baseline_s is None  # the least if it is too slow to be measured
    torchs = "" if torch_s is None else ">" * is_least + milliseconds(torch_s)
    return torchs, milliseconds(tuned.time_s), speedup_cell(torch_s, tuned.time_s, is_least=is_least)


def time_by_size(tuning: TableTuning) -> tuple[CurvePoint, ...]:
    """Return the least time of a complete tuning's rows by workspace budget, or by limit, the given one among them.

    Under a limit the times are predicted, and PyTorch's own counts as using no workspace where the limit exempts it.
    """
    size = tuning.config.workspace_limit_bytes
    if (division := tuning.division) is not None:
        budget = division.budget_bytes
        return budget_curve(division.options, division.counts, budgets=() if budget is None else [budget])
    options = {}
    for place, tuned in enumerate(row.tuned for row in tuning.rows):
        sets = desirable_sets(tuned.allowed_measurements, tuned.batch_size) if tuned.allowed_measurements else None
        options[place] = [*sets.of(tuned.batch_size)] if sets is not None else [tuned.configuration]
        baseline = baseline_or_declared(tuned.measurements, tuned.batch_size, None)
        if tuning.config.baseline_exempt and is_timed(baseline) and tuned.barred is None:
            options[place].append(replace(baseline, workspace_bytes=0))
    return limit_curve(
        options,
        {place: row.count for place, row in enumerate(tuning.rows)},
        limits=() if size is None else [size],
    )


def curve_table(tuning: TableTuning, points: Sequence[CurvePoint]) -> Table:
    """Return a table of the least time by workspace budget or limit, with the change from the given one."""
    bounds = tuning.config.workspace_limit_bytes, tuning.config.workspace_budget_bytes
    here = next((point for point in points if point.size_bytes in bounds), points[-1])
    kind = "budget" if tuning.division is not None else "limit"
    printed = new_table(f"Least time by workspace {kind}", (), (f"workspace {kind}", "ms", "change"))
    for point in points:
        change = f"{100 * (point.time_s / here.time_s - 1):+.1f} %" if point is not here and here.time_s else ""
        printed.add_row(format_bytes(point.size_bytes), milliseconds(point.time_s), change)
    printed.caption = f"no smaller {kind} is feasible, and no larger one faster, by what was measured"
    return printed


def step_table(source: str, curve: Sequence[Keeping]) -> Table:
    """Return a table of the time of a training step by its budget: see ``step_curve``."""
    kept, columns = curve[-1], ("budget", "share", "predicted", "counted", "ms", "over all kept", "computed again ms")
    printed = new_table(f"{source}: training step by memory budget", (), columns)
    for keeping in curve:
        printed.add_row(
            format_bytes(keeping.budget_bytes),
            f"{keeping.budget_bytes / kept.budget_bytes:.0%}",
            format_bytes(keeping.predicted_bytes),
            format_bytes(keeping.peak_bytes),
            milliseconds(keeping.predicted_s),
            ratio(keeping.predicted_s / kept.predicted_s),
            milliseconds(keeping.time_s),
        )
    printed.caption = (
        "times are predicted; predicted, counted: peak memory beside parameters, gradients and the batch; the first "
        "budget is the least, with the last one all is kept"
    )
    return printed


def batch_in_words(batch_size: int, keeping: Keeping) -> str:
    """Say which batch is the largest that fits a budget, and what its step takes: see ``largest_batch``."""
    return (
        f"largest batch within {format_bytes(keeping.budget_bytes)}: {batch_size}, peak "
        f"{format_bytes(keeping.peak_bytes)}, a step takes {format_seconds(keeping.predicted_s)} (predicted)"
    )


def steps_record(curve: Sequence[Keeping], largest: tuple[int, Keeping]) -> dict[str, Any]:
    """Return the JSON object of ``step_table`` and ``batch_in_words``."""

    def record(keeping: Keeping) -> dict[str, Any]:
        names = ("budget_bytes", "predicted_bytes", "peak_bytes", "time_s", "predicted_s")
        return {name: getattr(keeping, name) for name in names} | {"segments": [*map(str, keeping.segments)]}

    return {"curve": [*map(record, curve)], "largest_batch": {"batch_size": largest[0], **record(largest[1])}}


def tuning_record(tuning: TableTuning, curve: Sequence[CurvePoint] = ()) -> dict[str, Any]:
    """Return the JSON object that ``mucudnn tune --json`` writes; ``complete`` is false after Ctrl-C."""
    database = tuning.config.database
    return {
        "format_version": FORMAT_VERSION,
        "mucudnn": mucudnn.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": asdict(tuning.environment),
        "config": {**config_record(tuning.config), "database": None if database is None else str(database)},
        "source": tuning.source,
        "complete": not tuning.interrupted,
        "problems": [
            {
                "layer": ", ".join(row.names),
                "operation": tuned.problem.operation,
                "count": row.count,
                "batch_size": tuned.batch_size,
                "problem": asdict(tuned.problem),
                "torch_s": tuned.baseline_s,
                "mucudnn_s": tuned.time_s,
                "predicted_s": tuned.configuration.time_s,
                "speedup": tuned.speedup,
                "configuration": str(tuned.configuration),
                "workspace_bytes": tuned.configuration.workspace_bytes,
                "relative_error": tuned.relative_error,
                "reason": tuned.reason,
                "failures": [{**asdict(failure.micro_config), "reason": failure.why} for failure in tuned.failures],
                "unmeasured": [asdict(candidate) for candidate in tuned.left_out],
            }
            for row, tuned in ((row, row.tuned) for row in tuning.rows)
        ],
        "accounts": None
        if tuning.division is not None
        else [row.tuned.account and row.tuned.account.to_json() for row in tuning.rows],
        "total": {
            "torch_s": tuning.baseline_s,
            "mucudnn_s": tuning.time_s,
            "speedup": tuning.speedup,
            "workspace_bytes": tuning.workspace_bytes,
        },
        "division": None if tuning.division is None else tuning.division.to_json(),
        "curve": [asdict(point) for point in curve],
    }
