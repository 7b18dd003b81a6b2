"""``mucudnn bench numerics``: what differs from PyTorch in the numbers."""

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
    """Tell how far NaN and infinities spread, range and errors of each algorithm of the CPU, beside PyTorch's own.

    Computed on small images, in seconds. docs/compatibility.md says why, and what to do about it.
    """
    from mucudnn.bench.suites.accuracy.numerics import benchmark_numerics, numerics_tables
    from mucudnn.words.progress import progress_bar

    with outputs.shown(numerics_tables) as folder, progress_bar() as progress:
        benchmark_numerics(operations, dtype, folder, progress=progress)
