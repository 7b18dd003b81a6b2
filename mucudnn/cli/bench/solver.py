"""``mucudnn bench solver``: the time that the solvers take."""

from __future__ import annotations

import click

from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand


@click.command(cls=FileCommand)
@outputs("json", "out")
def solver(outputs: Outputs) -> None:
    """Time the solvers on made-up measurements, beside the times that they must not exceed."""
    from mucudnn.bench.suites.solver import benchmark_solvers, solver_tables

    with outputs.shown(solver_tables) as folder:
        benchmark_solvers(folder)
