"""Tells how fast the solvers are: a record for programs."""

from __future__ import annotations

from dataclasses import asdict

from mucudnn.bench.report.records import Record, origin
from mucudnn.bench.suites.solver.result import SolverBenchmark


def solver_record(benchmark: SolverBenchmark) -> Record:
    """What ``mucudnn bench solver --json`` writes; ``program`` is what harder divisions were solved with."""
    return {
        **origin(benchmark.environment, benchmark.date),
        "program": benchmark.program,
        "rows": [asdict(row) for row in benchmark.rows],
    }
