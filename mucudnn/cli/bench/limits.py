"""``mucudnn bench limits``: micro-batches against whole mini-batches, under equal workspace limits."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from mucudnn.bench.report.export import write_csv, write_each, write_json
from mucudnn.cli.shared import options
from mucudnn.cli.shared.kept_results import tell_nothing_is_left
from mucudnn.cli.shared.selections import filters_of, parse_limits
from mucudnn.terminal.command_files import FileCommand, SourceFile
from mucudnn.words.problem import Pair


@click.command(cls=FileCommand)
@click.argument("source", type=SourceFile("SOURCE"), default="deepbench-train")
@options.batch_of(256)
@options.input_shape
@options.dtype
@options.memory_format
@filters_of("--filters", "3x3,5x5")
@click.option(
    "--limits",
    type=options.Text("SIZE,...", parse_limits),
    default="8MiB,64MiB,128MiB,256MiB,512MiB",
    show_default=True,
    help="Most memory that any one operation may take beside its tensors; no limit at all is compared, too.",
)
@options.rounds(7, "Samples of each whole run.")
@click.option(
    "--seconds",
    type=options.Finite(min=0, min_open=True),
    help="Begin no problem that would not be done by then, as far as the earlier ones tell; default: all.",
)
@options.measuring
@options.threads
@options.device
@options.csv_file
@options.json_file
@options.out_folder
def limits(
    source: str,
    filters: tuple[Pair, ...],
    limits: tuple[int, ...],
    rounds: int,
    seconds: float | None,
    threads: int | None,
    device: str,
    csv_file: Path | None,
    json_file: Path | None,
    out: Path | None,
    **rest: Any,
) -> None:
    """Compare the best undivided engine with what mucudnn makes of micro-batches, under equal workspace limits.

    SOURCE is as for mucudnn tune; by default DeepBench's training layers with 3x3 and 5x5 filters. All is measured once
    without a limit, then whole runs decide under each. On CUDA the rivals are cuDNN's engines, and torch runs with
    torch.backends.cudnn.benchmark, too; on the CPU they are all algorithms. The files are complete after every problem.
    What the folder of --out has already is neither measured nor shown again.
    """
    from mucudnn.bench.contests.bounds import MachineLimits
    from mucudnn.bench.folders.writing import open_folder
    from mucudnn.bench.sources.layers import load_source, with_filters
    from mucudnn.bench.suites.limits.benchmark import compare_under_limits
    from mucudnn.bench.suites.limits.report import in_words, limits_record, limits_rows, limits_table
    from mucudnn.bench.suites.limits.stored import header_of, left_out, rows_of, subject_of
    from mucudnn.running.environment import current_environment
    from mucudnn.terminal.console import output, progress_bar
    from mucudnn.words.config import Config

    table = load_source(source, **options.pop_sizes(rest))
    if filters:
        table = with_filters(table, filters)
    options.use_threads(threads)
    config, dtype = Config(**rest), table.layers[0].problem.dtype
    comparison = None
    try:
        with ExitStack() as stack:
            progress, folder, known = stack.enter_context(progress_bar()), None, 0
            if out is not None:
                environment, rates = current_environment(device), MachineLimits.measured(device, dtype)
                header = header_of(table, config, (*sorted({*limits}), None), rounds, environment, rates)
                folder = stack.enter_context(open_folder(out, header))
            for comparison in compare_under_limits(
                *(table, config, limits),
                device=device,
                rounds=rounds,
                seconds=seconds,
                progress=progress,
                passes_over=lambda task: folder is not None and bool(folder.known(subject_of(task))),
            ):
                if folder is not None and len(comparison.problems) > known:
                    folder.add([*rows_of(comparison.problems[-1], config.policy)])
                    known = len(comparison.problems)
                write_each(
                    (csv_file, partial(write_csv, rows=limits_rows(comparison))),
                    (json_file, partial(write_json, record=limits_record(comparison))),
                )
            if folder is not None:
                folder.improve_limits({dtype: MachineLimits.measured(device, dtype)})
                folder.write_summary([] if comparison is None else [*left_out(comparison)])
                if comparison is None:
                    tell_nothing_is_left(folder)
    finally:  # however it ends, what is ready is told
        if comparison is not None:
            console = output()
            console.print(limits_table(comparison))
            console.print(in_words(comparison), soft_wrap=True)
            console.print(str(comparison.environment))
