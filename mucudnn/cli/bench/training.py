"""``mucudnn bench training``: the time and the peak memory of a training step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from mucudnn.bench.report.export import write_csv, write_each, write_json
from mucudnn.bench.suites.training.result import Precision
from mucudnn.cli.shared import options
from mucudnn.terminal.command_files import FileCommand
from mucudnn.words.problem import MemoryFormat

_BATCH_SIZES = {"cuda": 64, "cpu": 8}


@click.command(cls=FileCommand)
@click.argument("network", metavar="NAME")
@click.option("--batch", type=options.Count(), help="Samples in a mini-batch; default: 64 on cuda, 8 on cpu.")
@click.option(
    "--precisions", type=options.several(Precision), help="Which precisions; default: all that the device has."
)
@options.memory_formats
@options.rounds(9, "Samples of each variant, of a step or several.")
@click.option(
    "--seconds", type=options.Finite(min=0), help="When these are over, begin no further precision or memory format."
)
@options.choices(workspace_limit="64MiB", headroom=True)
@options.confirm
@options.threads
@options.device
@options.csv_file
@options.json_file
def training(
    network: str,
    batch: int | None,
    precisions: tuple[Precision, ...] | None,
    memory_formats: tuple[MemoryFormat, ...],
    rounds: int,
    seconds: float | None,
    threads: int | None,
    device: str,
    csv_file: Path | None,
    json_file: Path | None,
    **choices: Any,
) -> None:
    """Training steps of the network NAME: torch, on CUDA also with benchmark=True, and mucudnn, in turns in one run.

    Forward pass, loss, backward pass and gradient descent, in every precision and memory format: time and peak memory.
    The files are written anew after each of these, so that nothing is lost when the command is stopped.
    """
    import torch

    from mucudnn.bench.sources.networks import INPUT_SHAPE, build
    from mucudnn.bench.suites.training.benchmark import TrainingOptions, measure_training
    from mucudnn.bench.suites.training.report import training_record, training_rows, training_steps_table
    from mucudnn.bench.suites.training.result import VariantResult
    from mucudnn.running.environment import current_environment
    from mucudnn.terminal.console import output, progress_bar
    from mucudnn.words.config import Config

    config = Config(**choices)
    options.use_threads(threads)
    environment = current_environment(device)
    torch.manual_seed(0)
    model, cells = build(network), list[VariantResult]()
    try:
        with progress_bar() as progress:
            groups = measure_training(
                network,
                model,
                INPUT_SHAPE,
                batch_size=batch or _BATCH_SIZES[device],
                device=device,
                precisions=precisions,
                memory_formats=memory_formats,
                options=TrainingOptions(config, rounds, seconds, progress=progress),
            )
            for group in groups:
                cells += group
                write_each(
                    (csv_file, partial(write_csv, rows=training_rows(cells))),
                    (json_file, partial(write_json, record=training_record(cells, config, environment, rounds))),
                )
    finally:  # however it ends, what is ready is told
        if cells:
            console = output()
            console.print(training_steps_table(cells, config))
            console.print(str(environment))
