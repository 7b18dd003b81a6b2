"""Report of errors of a step: a table for people, CSV and JSON for programs."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import new_table
from mucudnn.bench.suites.step_errors.result import StepErrorsBenchmark


def step_errors_table(benchmark: StepErrorsBenchmark) -> Table:
    """A line for each variant and memory format."""
    printed = new_table(
        f"{benchmark.network}, batch {benchmark.batch_size}: one training step in float32 against float64",
        ("variant", "memory format", "worst parameter"),
        ["output", "loss", "gradients", "worst", "ours"],
    )
    for row in benchmark.rows:
        errors = (row.output, row.loss, row.gradients, row.worst)
        ours = f"{row.ours} of {row.operations}" if row.operations else ""
        printed.add_row(
            row.variant, row.memory_format, row.worst_parameter, *(f"{error:.1e}" for error in errors), ours
        )
    printed.caption = (
        "relative L2 errors: of all outputs, the loss, all gradients together, and the parameter with the largest; "
        "ours: operations of convolutions that do not run torch's own"
    )
    return printed


def step_errors_record(benchmark: StepErrorsBenchmark) -> Record:
    """The object that ``mucudnn bench errors --json`` writes."""
    return {
        **record_header(benchmark.config, benchmark.environment, benchmark.date),
        "network": benchmark.network,
        "batch_size": benchmark.batch_size,
        "rows": step_errors_rows(benchmark),
    }


def step_errors_rows(benchmark: StepErrorsBenchmark) -> list[Record]:
    """Lines of the CSV file."""
    return [asdict(row) for row in benchmark.rows]
