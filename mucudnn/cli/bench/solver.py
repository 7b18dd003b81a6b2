"""``mucudnn bench solver``: the time that the solvers take."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.results import shown
from mucudnn.terminal.files import FileCommand


@click.command(cls=FileCommand)
@options.json_file
@options.out_folder
def solver(json_file: Path | None, out: Path | None) -> None:
    """Time the solvers on made-up measurements, beside the times that they must not exceed."""
    from mucudnn.bench.suites.solver import benchmark_solvers, solver_tables

    with shown(out, solver_tables, json_file) as folder:
        benchmark_solvers(folder)
