"""``mucudnn bench metrics``: errors, gradients, repeatability, time and overhead of a layer's algorithms."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.layer_tables import named_layer
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand
from mucudnn.words.problem import Operation
from mucudnn.words.results import Configuration, counts_in

if TYPE_CHECKING:
    from mucudnn.bench.folders.reading import ResultFolder


def parse_configuration(text: str) -> Configuration:
    """Parse a configuration as shown in tables. Raises ``InvalidInputError`` for other text.

    >>> parse_configuration("gemm 8x2 + gemm 2").batch_size
    18
    """
    counts = counts_in(re.sub(r" (\d+)x(\d+)(?= |$)", r" \1×\2", " ".join(text.split())))
    return Configuration(tuple(one for one, count in counts for _ in range(count)), time_s=0.0, workspace_bytes=0)


@click.command(cls=FileCommand)
@options.source
@options.layer_of_source
@click.option(
    "--algorithms",
    "--algorithm",
    "algorithms",
    type=parameters.Text("NAME,...", parameters.parse_names),
    help="Algorithms beside PyTorch's own (mucudnn doctor lists them); default: all, or with --configuration none.",
)
@click.option(
    "--configuration",
    "configurations",
    type=parameters.Text("'NAME SIZE×COUNT + ...'", parse_configuration),
    multiple=True,
    help="A division of the batch, as tables show it: 'gemm 8×2 + fft 4'; x may replace ×. May be repeated.",
)
@click.option(
    "--module",
    "module_name",
    metavar="NAME",
    help="In place of a layer: any module of SOURCE's model, named as by named_modules(); '.' is the whole model.",
)
@options.operations
@options.dtype
@options.memory_format
@options.rounds(15, "Smallest number of samples of each call; short calls get more.")
@options.option("repetitions", parameters.Count(2), "Number of results to compare bit by bit.", 5)
@options.threads
@options.device
@outputs("csv", "plot", "out")
def metrics(
    source: str,
    layer_name: str | None,
    module_name: str | None,
    algorithms: tuple[str, ...] | None,
    configurations: tuple[Configuration, ...],
    operations: tuple[Operation, ...],
    rounds: int,
    repetitions: int,
    device: str,
    outputs: Outputs,
    **sizes: Any,
) -> None:
    """Measure the operators of one layer of SOURCE, as level 0 of Deep500 does: PyTorch's own and each algorithm.

    It can also measure configurations, which divide the mini-batch, or any module of a model against a float64 copy.

    Shows errors against float64 (L1, L2, maximum, and with --plot their places), a numerical check of gradients,
    whether runs repeat bit by bit, the time of a call through a module, samples per second, and the overhead of the
    module over the algorithm's own time. SOURCE is as for mucudnn tune. See docs/compatibility.md.
    """
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.bench.sources.models import seeded_model
    from mucudnn.bench.suites.accuracy.layers import MetricsOptions, benchmark_metrics
    from mucudnn.bench.suites.accuracy.modules import benchmark_module, called_module
    from mucudnn.bench.suites.accuracy.report import draw_error_maps, metrics_tables
    from mucudnn.measuring.whole_runs import Machine
    from mucudnn.words.progress import progress_bar

    if module_name is not None and (layer_name or algorithms or configurations):
        raise click.UsageError("--module excludes --layer, --algorithms and --configuration: leave them out")
    layer = None if module_name is not None else named_layer(load_source(source, **sizes), layer_name)
    choices = MetricsOptions(operations, algorithms, rounds, repetitions, configurations)
    with outputs.shown(metrics_tables, _rows, draw_error_maps) as folder, progress_bar() as progress:
        if layer is not None:
            benchmark_metrics(source, layer, choices, folder, device=device, progress=progress)
        elif module_name is not None:
            model, arguments = seeded_model(source, sizes.pop("batch") or 1, device, **sizes)
            called, machine = called_module(model, module_name, arguments), Machine.current(device)
            benchmark_module(source, module_name, called, choices, folder, machine=machine, progress=progress)


def _rows(folder: ResultFolder) -> Callable[[Path], None]:
    """Return a function that writes the folder's rows to a CSV file, with values derived from the samples."""
    from mucudnn.bench.pages.measured import measured
    from mucudnn.bench.pages.reports import write_frame

    return partial(write_frame, measured(folder))
