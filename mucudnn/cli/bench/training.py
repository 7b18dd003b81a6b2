"""``mucudnn bench training``: the time and the peak memory of a training step."""

from __future__ import annotations

import click

from mucudnn.bench.contests.variants import Variant
from mucudnn.bench.suites.training.setting import How, Precision
from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import SOURCE, FileCommand
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat

_BATCH_SIZES = {"cuda": 64, "cpu": 8}


@click.command(cls=FileCommand)
@click.argument("sources", type=SOURCE, nargs=-1, required=True)
@options.option(
    "batch",
    parameters.COUNTS,
    "Samples in a mini-batch: of all sources, or of each in turn, as 16,8; default: 64 on cuda, 8 on cpu.",
    variable="batch_sizes",
)
@options.input_shape
@options.option("precisions", parameters.several(Precision), "Which precisions; default: all that the device has.")
@options.memory_formats
@options.option(
    "variants",
    parameters.several(Variant),
    "Which, beside PyTorch's own, with which all are compared; default: all that the device has.",
)
@options.option(
    "how",
    parameters.choice(How),
    "How mucudnn gets into the step: modules tuned before, or all convolutions as they are met.",
    "optimize",
)
@options.rounds(9, "Samples of each variant, of a step or several.")
@options.run_time_limit
@options.config(options.memory_bounds("64MiB", headroom=True), *options.MEASURING, *options.IN_STEPS)
@options.threads
@options.device
@outputs("csv", "json", "out")
def training(
    sources: tuple[str, ...],
    batch_sizes: tuple[int, ...] | None,
    input_shape: tuple[int, int, int] | None,
    precisions: tuple[Precision, ...] | None,
    memory_formats: tuple[MemoryFormat, ...],
    variants: tuple[Variant, ...] | None,
    how: How,
    rounds: int,
    run_time_limit: float | None,
    device: str,
    outputs: Outputs,
    config: Config,
) -> None:
    """Training steps of each SOURCE: PyTorch, mucudnn, both under torch.compile, on CUDA also PyTorch with
    benchmark=True.

    Each has a process of its own, and they take turns. SOURCE is a network of mucudnn layers, or package.module:factory
    or file.py:factory, a function that returns your own PyTorch model (with --input 3x224x224), which learns to give
    small outputs. Forward pass, loss, backward pass and gradient descent, in every precision and memory format: images
    a second, and peak memory. On the CPU, in steps of their own, each layer is timed in place, so that convolutions and
    what is left can be compared, too. What the folder of --out has already is not measured again.
    """
    from mucudnn.bench.suites.training.benchmark import TrainingOptions, benchmark_training
    from mucudnn.bench.suites.training.report import training_tables
    from mucudnn.words.progress import progress_bar

    _require_enable(how)
    asked = TrainingOptions(
        config, precisions, memory_formats, variants, rounds=rounds, seconds=run_time_limit, how=how
    )
    sizes = _batch_sizes(batch_sizes or (_BATCH_SIZES[device],), sources)
    with outputs.shown(training_tables) as folder, progress_bar() as progress:
        benchmark_training(*(sources, sizes, asked, folder), input_size=input_shape, device=device, progress=progress)


def _require_enable(how: How) -> None:
    """Raises ``UsageError`` for what only ``mucudnn.tuned`` has, beside another way into the step."""
    options_of_enable = {"first_call_time": "--first-call-time", "background": "--background"}
    given = [option for name, option in options_of_enable.items() if options.is_given(name)]
    if given and how is not How.ENABLE:
        raise click.UsageError(
            f"{' and '.join(given)}: for convolutions that are tuned as they are met: add --how enable, or leave out",
            click.get_current_context(),
        )


def _batch_sizes(given: tuple[int, ...], sources: tuple[str, ...]) -> tuple[int, ...]:
    """One for each network. Raises ``UsageError`` where they do not go together."""
    if len(given) not in (1, len(sources)):
        raise click.UsageError(
            f"--batch has {len(given)} sizes for {len(sources)} sources: give one for all, or one for each"
        )
    return given * len(sources) if len(given) == 1 else given
