"""``mucudnn bench training``: the time and the peak memory of a training step."""

from __future__ import annotations

from typing import Any

import click

from mucudnn.bench.results.variants import How, Precision, Variant
from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.cli.shared.parameters import SOURCE
from mucudnn.core.config import Config

_BATCH_SIZES = {"cuda": 64, "cpu": 8}


@click.command(cls=FileCommand)
@click.argument("sources", type=SOURCE, nargs=-1, required=True)
@options.batch_sizes("64 on cuda, 8 on cpu")
@options.input_shape
@options.option(
    "precisions",
    parameters.several(Precision),
    "Precisions; default: all that the device supports, except float16. Half precision is by torch.autocast.",
)
@options.memory_formats
@options.option(
    "variants",
    parameters.several(Variant),
    "Variants to compare with PyTorch's own; default: all that the device supports.",
)
@options.option(
    "how",
    parameters.choice(How),
    "How mucudnn enters the step: optimize tunes modules before, enable all convolutions as they occur.",
    "optimize",
)
@options.rounds(9, "Samples of each variant; each is one step or several.")
@options.run_time_limit
@options.config(options.limit_or_headroom, "workspace_budget", "confirm", "time_limit", "database")
@options.threads
@options.device
@outputs("out")
def training(
    sources: tuple[str, ...],
    batch_sizes: tuple[int, ...] | None,
    input_shape: tuple[int, ...] | None,
    run_time_limit: float | None,
    device: str,
    outputs: Outputs,
    config: Config,
    **compared: Any,
) -> None:
    """Time training steps of each SOURCE: PyTorch, mucudnn, both under torch.compile, on the CPU also mucudnn without
    groups, on CUDA PyTorch with benchmark=True.

    Each variant has its own process, and their steps are interleaved, in all memory formats. SOURCE is a network of
    mucudnn layers, or package.module:factory or file.py:factory, a function that returns your own PyTorch model (with
    --input 3x224x224), which is trained to minimize its outputs. A step is forward pass, loss, backward pass and
    gradient descent, in every precision and memory format; shown are images per second, seconds until ready, and peak
    memory. On the CPU, separate steps time each layer in place, to compare convolutions and the rest. Rows that the
    folder of --out already has are not measured again.
    """
    from mucudnn.bench.suites.training import TrainingOptions, benchmark_training, training_tables
    from mucudnn.core.terminal import progress_bar

    comparison = TrainingOptions(config, seconds=run_time_limit, **compared)
    sizes = parameters.one_each(batch_sizes or (_BATCH_SIZES[device],), sources)
    with outputs.shown(training_tables) as folder, progress_bar() as progress:
        benchmark_training(sources, sizes, comparison, folder, input_size=input_shape, device=device, progress=progress)
