"""``mucudnn bench solver``: the time that the solvers take."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.bench.report.export import write_json
from mucudnn.cli.shared import options
from mucudnn.terminal.files import FileCommand


@click.command(cls=FileCommand)
@options.json_file
@options.out_folder
def solver(json_file: Path | None, out: Path | None) -> None:
    """Time the solvers on made-up measurements, beside the times that they must not exceed."""
    from mucudnn.bench.suites.solver.benchmark import benchmark_solvers
    from mucudnn.bench.suites.solver.report import solver_record
    from mucudnn.terminal.console import output

    benchmark = benchmark_solvers(out)
    output().print(str(benchmark))
    if json_file is not None:
        write_json(json_file, solver_record(benchmark))
