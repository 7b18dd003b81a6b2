"""``mucudnn bench limits``: micro-batches against undivided mini-batches, under equal workspace limits."""

from __future__ import annotations

from typing import Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import SOURCE, FileCommand
from mucudnn.words.config import Config
from mucudnn.words.problem import Pair


@click.command(cls=FileCommand)
@click.argument("source", type=SOURCE, default="deepbench-train")
@options.batch(256)
@options.input_shape
@options.dtype
@options.memory_format
@options.filters("--filters", "3x3,5x5")
@options.option(
    "limits",
    parameters.Text("SIZE,...", parameters.parse_sizes),
    "Workspace limits of any one operation; a run without limit is always added.",
    "8MiB,64MiB,128MiB,256MiB,512MiB",
)
@options.rounds(7, "Smallest number of samples of each whole run; short calls get more.")
@options.run_time_limit
@options.config(*options.MEASURING, thorough=True)
@options.threads
@options.device
@outputs("csv", "json", "out")
def limits(
    source: str,
    filters: tuple[Pair, ...],
    limits: tuple[int | None, ...],
    rounds: int,
    run_time_limit: float | None,
    device: str,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    """Compare the best undivided algorithm with mucudnn's micro-batches, under equal workspace limits.

    SOURCE is as for mucudnn tune; by default DeepBench's training layers with 3x3 and 5x5 filters. All candidates are
    measured thoroughly, then whole runs decide under each limit and without one. On CUDA PyTorch also runs with
    torch.backends.cudnn.benchmark. Rows that the folder of --out already has are not measured again.
    """
    from mucudnn.bench.sources.layers import load_source, with_filters
    from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
    from mucudnn.bench.suites.convolutions.contest import Choices
    from mucudnn.bench.suites.convolutions.report import limits_tables
    from mucudnn.words.config import BatchSizePolicy
    from mucudnn.words.progress import progress_bar

    table = load_source(source, **sizes)
    if filters:
        table = with_filters(table, filters)
    wanted = (*sorted(limit for limit in limits if limit is not None), None)
    asked = Choices(
        (BatchSizePolicy(config.policy),), wanted, rounds=rounds, time_limit_s=run_time_limit, same_time=True
    )
    with outputs.shown(limits_tables) as folder, progress_bar() as progress:
        benchmark_convolutions("limits", table, config, asked, folder, device=device, progress=progress)
