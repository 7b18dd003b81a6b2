"""``mucudnn bench numerics``: numerical differences from PyTorch."""

from __future__ import annotations

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand
from mucudnn.words.problem import Operation


@click.command(cls=FileCommand)
@options.dtype
@options.operations
@options.threads
@outputs("csv", "json", "out")
def numerics(
    dtype: str,
    operations: tuple[Operation, ...],
    outputs: Outputs,
) -> None:
    """Show how far NaN and infinities spread, and range and errors, for each CPU algorithm and PyTorch's own.

    Takes seconds, on small images. docs/compatibility.md explains the differences and what to do about them.
    """
    from mucudnn.bench.suites.accuracy.numerics import benchmark_numerics, numerics_tables
    from mucudnn.words.progress import progress_bar

    with outputs.shown(numerics_tables) as folder, progress_bar() as progress:
        benchmark_numerics(operations, dtype, folder, progress=progress)
