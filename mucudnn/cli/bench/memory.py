"""``mucudnn bench memory``: the peak memory and the time of a training step, or of a call within a memory budget."""

from __future__ import annotations

import click

from mucudnn.bench.contests.variants import Variant, chosen_variants
from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat


@click.command(cls=FileCommand)
@options.source
@options.memory_format
@options.rounds(9, "Samples of each variant; each is one step or several.", least=2)
@options.option(
    "runs",
    parameters.Count(least=0),
    "Processes of each variant in which peak resident memory is measured; 0 skips it. Ignored on cuda.",
    3,
)
@options.option(
    "variants",
    parameters.several(Variant),
    "Variants to compare with PyTorch's own; default: all that the device supports.",
)
@options.config(options.memory_bounds("headroom", headroom=True), "memory_budget", "cache_budget", *options.MEASURING)
@options.threads
@options.device
@outputs("json", "out")
def memory(
    source: str,
    batch: int | None,
    input_shape: tuple[int, int, int] | None,
    memory_format: MemoryFormat,
    rounds: int,
    runs: int,
    variants: tuple[Variant, ...] | None,
    device: str,
    outputs: Outputs,
    config: Config,
) -> None:
    """Measure memory and time of a training step of SOURCE's model: PyTorch and mucudnn, both also under torch.compile.

    SOURCE is a network of mucudnn layers, or package.module:factory or file.py:factory, a function that returns your
    own PyTorch model (with --input 3x224x224). mucudnn runs within the headroom or the given limit, and also with a
    limit of 64 MiB. Each variant has its own process, and their steps are interleaved. Shows the peak of PyTorch's
    allocator, that of the whole process, and the time of a step. Rows in the folder of --out are not measured again.

    With --memory-budget a call of the model for inference takes the place of the training step, and mucudnn runs within
    the budget and without one. Filters that --cache-budget keeps between calls are not in the allocator's peak.
    """
    from mucudnn.bench.sources.models import blamed_in_training, importable, seeded_model, settle_statistics
    from mucudnn.bench.suites.memory import benchmark_memory, memory_tables
    from mucudnn.running.environment import current_environment
    from mucudnn.tracing.own_step import undisturbed
    from mucudnn.tracing.training_step import training_step
    from mucudnn.words.progress import progress_bar

    chosen_variants(variants, device)
    current_environment(device)  # fails early if the device is missing
    model, arguments = seeded_model(source, batch or 1, device, input_shape=input_shape, memory_format=memory_format)
    if config.memory_budget is not None:
        settle_statistics(model, arguments)
        model.eval()
    else:
        with undisturbed(model), blamed_in_training(source, arguments[0].shape):
            training_step(model, arguments)  # fails early if the model cannot be trained
    # Child processes inherit the path
    with outputs.shown(memory_tables) as folder, importable(source), progress_bar() as progress:
        benchmark_memory(
            *(model, arguments, config, folder),
            name=source,
            memory_format=memory_format,
            rounds=rounds,
            runs=runs,
            variants=variants,
            progress=progress,
        )
