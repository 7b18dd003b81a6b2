"""Report of the solver benchmark: a record for programs."""

from __future__ import annotations

from dataclasses import asdict

from mucudnn.bench.report.records import Record, origin
from mucudnn.bench.suites.solver.result import SolverBenchmark, SolverTime


def solver_record(benchmark: SolverBenchmark) -> Record:
    """The object that ``mucudnn bench solver --json`` writes; ``program`` is the solver of harder divisions."""
    return {
        **origin(benchmark.environment, benchmark.date),
        "program": benchmark.program,
        "rows": [_row(row) for row in benchmark.rows],
    }


def _row(row: SolverTime) -> Record:
    record = asdict(row)
    del record["samples_s"]
    return record
