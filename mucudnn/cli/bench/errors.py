"""``mucudnn bench errors``: errors of a network's training step against float64."""

from __future__ import annotations

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.cli.shared.parameters import Text
from mucudnn.terminal.files import FileCommand
from mucudnn.words.config import DEFAULT_MAX_RELATIVE_ERROR, Config, from_text
from mucudnn.words.problem import MemoryFormat


def _error_bounds(text: str) -> tuple[float, ...]:
    """Parse error bounds of algorithms. Raises ``InvalidInputError`` for other text."""
    numbers = [from_text("max_relative_error", part) for part in text.split(",")]
    return tuple(Config(max_relative_error=number).error_bound("float32") for number in dict.fromkeys(numbers))


@click.command(cls=FileCommand)
@options.source
@options.memory_formats
@options.config(
    options.memory_bounds("64MiB", headroom=True),
    *(name for name in options.MEASURING if name != "max_relative_error"),
)
@options.option(
    "max-relative-error",
    Text("NUMBER,...", _error_bounds),
    "Exclude algorithms with a larger relative L2 error against float64; several bounds are compared.",
    (DEFAULT_MAX_RELATIVE_ERROR["float32"],),
    "error_bounds",
)
@options.threads
@outputs("csv", "json", "out")
def errors(
    source: str,
    batch: int | None,
    input_shape: tuple[int, int, int] | None,
    memory_formats: tuple[MemoryFormat, ...],
    outputs: Outputs,
    config: Config,
    error_bounds: tuple[float, ...],
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
            error_bounds=error_bounds,
            memory_formats=memory_formats,
            objective=objective_for(source),
            progress=progress,
        )
