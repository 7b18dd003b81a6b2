"""``mucudnn bench limits``: micro-batches against whole mini-batches, under equal workspace limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.results import shown
from mucudnn.cli.shared.selections import filters_of, parse_limits
from mucudnn.terminal.files import SOURCE, FileCommand
from mucudnn.words.problem import Pair


@click.command(cls=FileCommand)
@click.argument("source", type=SOURCE, default="deepbench-train")
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
@options.rounds(7, "Least samples of each whole run; short calls get more.")
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
    """Compare the best undivided algorithm with what mucudnn makes of micro-batches, under equal workspace limits.

    SOURCE is as for mucudnn tune; by default DeepBench's training layers with 3x3 and 5x5 filters. All is measured
    thoroughly, then whole runs decide under each limit, and without one. On CUDA torch runs with
    torch.backends.cudnn.benchmark, too. What the folder of --out has already is not measured again.
    """
    from mucudnn.bench.sources.layers import load_source, with_filters
    from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
    from mucudnn.bench.suites.convolutions.choices import Choices
    from mucudnn.bench.suites.convolutions.report import limits_tables
    from mucudnn.terminal.console import progress_bar
    from mucudnn.words.config import BatchSizePolicy, Config

    table = load_source(source, **options.pop_sizes(rest))
    if filters:
        table = with_filters(table, filters)
    options.use_threads(threads)
    config = replace(Config(**rest), thorough=True)
    wanted = (*sorted({*limits}), None)
    asked = Choices((BatchSizePolicy(config.policy),), wanted, rounds=rounds, time_limit_s=seconds, same_time=True)
    with shown(out, limits_tables, json_file, csv_file) as folder, progress_bar() as progress:
        benchmark_convolutions("limits", table, config, asked, folder, device=device, progress=progress)
