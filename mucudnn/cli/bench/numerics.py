"""``mucudnn bench numerics``: what differs from torch in the numbers."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.results import shown
from mucudnn.terminal.files import FileCommand
from mucudnn.words.problem import Operation


@click.command(cls=FileCommand)
@options.dtype
@options.operations
@options.threads
@options.csv_file
@options.json_file
@options.out_folder
def numerics(
    dtype: str,
    operations: tuple[Operation, ...],
    threads: int | None,
    csv_file: Path | None,
    json_file: Path | None,
    out: Path | None,
) -> None:
    """Tell how far NaN and infinities spread, range and errors of each algorithm of the CPU, beside torch's own.

    Computed on small images, in seconds. docs/numerics.md says why, and what to do about it.
    """
    from mucudnn.bench.suites.accuracy.numerics import benchmark_numerics, numerics_tables
    from mucudnn.terminal.console import progress_bar

    options.use_threads(threads)
    with shown(out, numerics_tables, json_file, csv_file) as folder, progress_bar() as progress:
        benchmark_numerics(operations, dtype, folder, progress=progress)
