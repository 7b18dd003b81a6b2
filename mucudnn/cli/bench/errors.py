"""``mucudnn bench errors``: errors of a network's training step against float64."""

from __future__ import annotations

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat


@click.command(cls=FileCommand)
@options.source
@options.memory_formats
@options.config(options.memory_bounds("64MiB", headroom=True), *options.MEASURING)
@options.threads
@outputs("csv", "json", "out")
def errors(
    source: str,
    batch: int | None,
    input_shape: tuple[int, int, int] | None,
    memory_formats: tuple[MemoryFormat, ...],
    outputs: Outputs,
    config: Config,
) -> None:
    """Compare one float32 training step of SOURCE's model, by PyTorch and by mucudnn, with the same step in float64.

    Compares output, loss and gradients on the CPU, with the same parameters, images and random numbers, without
    dropout. SOURCE is a network of mucudnn layers, or a model of your own, as for mucudnn tune.
    """
    import torch

    from mucudnn.bench.sources.models import blamed_in_training, importable, load_model
    from mucudnn.bench.sources.networks import objective_for
    from mucudnn.bench.suites.accuracy.steps import benchmark_step_errors, errors_tables
    from mucudnn.words.progress import progress_bar

    torch.manual_seed(0)
    model, shape = load_model(source, input_shape=input_shape)
    with (
        outputs.shown(errors_tables) as folder,
        progress_bar() as progress,
        importable(source),
        blamed_in_training(source, (batch or 1, *shape)),
    ):
        benchmark_step_errors(
            *(source, model, shape, folder),
            batch_size=batch or 1,
            config=config,
            memory_formats=memory_formats,
            objective=objective_for(source),
            progress=progress,
        )
