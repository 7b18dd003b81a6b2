"""``mucudnn bench metrics``: errors, gradients, repeatability and NaN of a layer's algorithms; errors of a step."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.options import outputs
from mucudnn.core.config import Config, from_text
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.records import Configuration, counts_in
from mucudnn.core.values import did_you_mean

if TYPE_CHECKING:
    from mucudnn.bench.sources.layers import Layer, LayerTable


def parse_configuration(text: str) -> Configuration:
    """Parse a configuration as shown in tables. Raises ``InvalidInputError`` for other text.

    >>> parse_configuration("gemm 8x2 + gemm 2").batch_size
    18
    """
    counts = counts_in(re.sub(r" (\d+)x(\d+)(?= |$)", r" \1×\2", " ".join(text.split())))
    parts = tuple(part for part, count in counts for _ in range(count))
    return Configuration(parts, time_s=0.0, workspace_bytes=0)


def _error_bound(text: str) -> float:
    return Config(max_relative_error=from_text("max_relative_error", text)).error_bound("float32")


@click.command(cls=FileCommand)
@options.source
@options.layer_of_source
@click.option(
    "--configuration",
    "configurations",
    type=parameters.Text("'NAME SIZE×COUNT + ...'", parse_configuration),
    multiple=True,
    help="A division of the batch, as tables show it: 'gemm 8×2 + fft 4'; x may replace ×. May be repeated.",
)
@options.option(
    "max-relative-error",
    parameters.Text("NUMBER,...", parameters.listed(_error_bound)),
    "Of a step: exclude algorithms with a larger error; several bounds are compared. Default: as mucudnn tune.",
    variable="error_bounds",
)
@options.config("algorithms", "operations")
@options.dtype
@options.memory_format
@options.rounds(15, "Smallest number of samples of each call; short calls get more.")
@options.threads
@options.device
@outputs("out")
def metrics(
    source: str,
    layer_name: str | None,
    configurations: tuple[Configuration, ...],
    error_bounds: tuple[float, ...] | None,
    config: Config,
    rounds: int,
    device: str,
    outputs: Outputs,
    **sizes: Any,
) -> None:
    """Compare convolutions with float64: one layer by each algorithm, or a training step of SOURCE's model.

    With --layer, or if SOURCE is a table: errors of PyTorch's own convolution, of each algorithm and of configurations
    that divide the mini-batch, as level 0 of Deep500 has them (L1, L2, maximum); a numerical check of gradients;
    whether runs repeat bit by bit; where NaN and infinities spread; the time of a call through a module.

    Otherwise: errors of output, loss and gradients of one step, by PyTorch and by mucudnn under each bound of a layer's
    error, with the same parameters, images and random numbers, without dropout. SOURCE is as for mucudnn tune. See
    docs/compatibility.md.
    """
    import torch

    from mucudnn.bench.sources.layers import load_source
    from mucudnn.bench.sources.models import blamed_in_training, importable, model_of
    from mucudnn.bench.sources.trainee import labelled_batches, loss_for
    from mucudnn.bench.suites.metrics import benchmark_layer, benchmark_step, layer_tables, step_tables
    from mucudnn.core.terminal import progress_bar
    from mucudnn.measuring.whole_runs import Machine

    is_layer = layer_name is not None or bool(configurations)
    torch.manual_seed(0)
    with importable(source):
        model_and_shape = None if is_layer else model_of(source, sizes["input_shape"], initialised=True)
    if model_and_shape is None:
        if options.is_given("error_bounds"):
            raise click.UsageError("--max-relative-error is for a step of the whole model: leave --layer out")
        layer = named_layer(load_source(source, **sizes), layer_name)
        with outputs.shown(layer_tables) as folder, progress_bar() as progress:
            benchmark_layer(
                source,
                layer,
                config,
                folder,
                configurations=configurations,
                rounds=rounds,
                machine=Machine.current(device),
                progress=progress,
            )
        return
    (model, shape), batch_size = model_and_shape, sizes["batch"] or 1
    with (
        outputs.shown(step_tables) as folder,
        progress_bar() as progress,
        importable(source),
        blamed_in_training(source, (batch_size, *shape)),
    ):
        ((images, labels),) = labelled_batches(1, batch_size, shape)
        benchmark_step(
            source,
            (model, (images.to(device), labels.to(device)), loss_for(source)),
            config,
            folder,
            error_bounds=error_bounds or (config.error_bound(sizes["dtype"]),),
            dtype=sizes["dtype"],
            memory_format=sizes["memory_format"],
            progress=progress,
        )


def named_layer(table: LayerTable, name: str | None) -> Layer:
    """Return the layer that has this name; for None, the only layer of the table.

    Raises ``InvalidInputError`` if there is no such layer.
    """
    by_name = {name: layer for layer in table.layers for name in (layer.name, *layer.names)}
    if name in by_name:
        return by_name[name]
    if name is None and len(table.layers) == 1:
        return table.layers[0]
    asked = "no layer is named" if name is None else f"{table.source} has no layer {name!r}"
    names = ", ".join(layer.names[0] for layer in table.layers)
    raise InvalidInputError(f"{asked}; {did_you_mean(name or '', by_name)}give --layer NAME, one of {names}")
