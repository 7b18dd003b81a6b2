"""``mucudnn bench numerics``: what differs from torch in the numbers."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.bench.report.export import write_csv, write_each, write_json
from mucudnn.cli.shared import options
from mucudnn.terminal.command_files import FileCommand
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
    from mucudnn.bench.suites.numerics.benchmark import benchmark_numerics
    from mucudnn.bench.suites.numerics.report import in_words, numerics_record, numerics_rows, numerics_table
    from mucudnn.terminal.console import output, progress_bar

    options.use_threads(threads)
    with progress_bar() as progress:
        benchmark = benchmark_numerics(operations, dtype, progress, out)
    console = output()
    console.print(numerics_table(benchmark))
    console.print(in_words(benchmark), soft_wrap=True)
    console.print(str(benchmark.environment))
    write_each(
        (csv_file, lambda path: write_csv(path, numerics_rows(benchmark))),
        (json_file, lambda path: write_json(path, numerics_record(benchmark))),
    )
