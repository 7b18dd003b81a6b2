"""Tells what a workspace budget buys: a table and words for people, CSV and JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.table import Table

from mucudnn.bench.analyses.explanation import ExplainedLayer, Explanation
from mucudnn.bench.report.export import CURVE, write_csv, write_each
from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import long_name, milliseconds, new_table, short_name
from mucudnn.terminal.files import beside
from mucudnn.words.results import Configuration
from mucudnn.words.units import format_bytes, format_seconds


def explanation_table(explanation: Explanation) -> Table:
    """Per layer and operation: what it got, what the next faster configuration needs more, and saves; then totals."""
    chosen = [row.chosen for row in explanation.rows]
    printed = new_table(
        f"{explanation.tuning.source}, workspace budget {format_bytes(explanation.budget_bytes)}",
        ("layer", "operation", "configuration"),
        ("count", "ms", "workspace", "next faster", "workspace more", "saves ms"),
        footer=(
            *("total", "", "", "", milliseconds(explanation.time_s)),
            *(format_bytes(sum(c.workspace_bytes for c in chosen)), "", "", ""),
        ),
    )
    for row in explanation.rows:
        printed.add_row(*_cells(row))
    return printed


def in_words(explanation: Explanation) -> str:
    """Say what some more or less memory would change, and how the division was found."""
    divided = explanation.tuning.divided
    account = "" if divided is None else f"\n{divided.division}"
    here = f"{format_bytes(explanation.budget_bytes)}: {format_seconds(explanation.time_s)}"
    return f"{here}; {explanation.marginal}{account}"


def explanation_record(explanation: Explanation) -> Record:
    """Return what ``mucudnn explain --json`` writes."""
    divided = explanation.tuning.divided
    return {
        **record_header(explanation.tuning.config, explanation.tuning.environment, datetime.now(UTC)),
        "source": explanation.tuning.source,
        "problems": [_layer_record(row) for row in explanation.rows],
        "marginal": explanation.marginal.to_json(),
        "curve": explanation.curve.to_json(),
        "division": None if divided is None else divided.division.to_json(),
    }


def curve_path(path: Path) -> Path:
    """Return where ``write_tables`` puts the curve: ``memory.csv`` -> ``memory-curve.csv``."""
    return beside(path, CURVE)


def write_tables(explanation: Explanation, path: Path) -> None:
    """Write one line for each problem; beside it, in ``curve_path(path)``, one for each point of the curve."""
    write_each(
        (path, partial(write_csv, rows=[_layer_record(row) for row in explanation.rows])),
        (curve_path(path), partial(write_csv, rows=[asdict(point) for point in explanation.curve.points])),
    )


def _cells(row: ExplainedLayer) -> tuple[str, ...]:
    tuned = row.row.tuned
    more = ("", "", "")
    if row.next_faster is not None:
        more = (str(row.next_faster), format_bytes(row.extra_bytes), milliseconds(row.saved_s))
    return (
        short_name(row.row.names),
        str(tuned.problem.operation),
        str(row.chosen),
        str(row.row.count),
        milliseconds(row.row.count * row.chosen.time_s),
        format_bytes(row.chosen.workspace_bytes),
        *more,
    )


def _layer_record(row: ExplainedLayer) -> Record:
    """Times are of one call; ``saved_s`` is of all occurrences."""
    tuned = row.row.tuned
    return {
        "layer": long_name(row.row.names),
        "operation": str(tuned.problem.operation),
        "count": row.row.count,
        "batch_size": tuned.batch_size,
        **_configuration("chosen", row.chosen),
        **_configuration("next_faster", row.next_faster),
        "extra_bytes": row.extra_bytes,
        "saved_s": row.saved_s,
    }


def _configuration(what: str, configuration: Configuration | None) -> Record:
    if configuration is None:
        return {what: None, f"{what}_s": None, f"{what}_workspace_bytes": None}
    return {
        what: str(configuration),
        f"{what}_s": configuration.time_s,
        f"{what}_workspace_bytes": configuration.workspace_bytes,
    }
