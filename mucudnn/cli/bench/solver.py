"""``mucudnn bench solver``: the running time of the solvers."""

from __future__ import annotations

import click

from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand


@click.command(cls=FileCommand)
@outputs("json", "out")
def solver(outputs: Outputs) -> None:
    """Time the solvers on generated measurements, and compare with their time limits."""
    from mucudnn.bench.suites.solver import benchmark_solvers, solver_tables

    with outputs.shown(solver_tables) as folder:
        benchmark_solvers(folder)
