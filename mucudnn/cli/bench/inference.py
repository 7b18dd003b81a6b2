"""``mucudnn bench inference``: what kept filters bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mucudnn.bench.report.export import write_json
from mucudnn.cli.shared import options
from mucudnn.terminal.command_files import FileCommand
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.units import parse_bytes


@click.command(cls=FileCommand)
@click.argument("network", metavar="NAME")
@options.batch_of(1)
@options.memory_format
@options.rounds(25, "Samples of each variant.")
@click.option(
    "--cache-budget",
    type=options.Text("SIZE", options.checked_by(parse_bytes)),
    default="none",
    show_default=True,
    help="Most memory for what is prepared from filters and kept from call to call, as 64MiB, or none.",
)
@options.memory_bounds(workspace_limit="none")
@options.policy
@options.algorithms
@options.max_relative_error
@options.deterministic
@options.strict
@options.time_limit
@options.database
@options.threads
@options.json_file
def inference(
    network: str,
    batch: int,
    memory_format: MemoryFormat,
    rounds: int,
    threads: int | None,
    json_file: Path | None,
    **choices: Any,
) -> None:
    """Inference of the network NAME: torch, mucudnn, and mucudnn with kept filters, whole and layer by layer.

    On the CPU, where alone filters are kept.
    """
    import torch

    from mucudnn.bench.measure.operands import input_shape
    from mucudnn.bench.sources.networks import arguments_for, build, input_shape_of
    from mucudnn.bench.suites.inference.benchmark import benchmark_inference
    from mucudnn.bench.suites.inference.report import inference_record, inference_table
    from mucudnn.kernels.contract.buffers import TORCH_FORMATS
    from mucudnn.terminal.console import output, progress_bar
    from mucudnn.words.config import Config

    config = Config(**choices)
    options.use_threads(threads)
    torch_format = TORCH_FORMATS[memory_format]
    model = build(network).to(memory_format=torch_format)  # type: ignore[call-overload]
    x = torch.randn(input_shape(batch, input_shape_of(network))).contiguous(memory_format=torch_format)
    with progress_bar() as progress:
        benchmark = benchmark_inference(
            model, arguments_for(network, x), config, name=network, rounds=rounds, progress=progress
        )
    console = output()
    console.print(inference_table(benchmark))
    console.print(str(benchmark.environment))
    if json_file is not None:
        write_json(json_file, inference_record(benchmark))
