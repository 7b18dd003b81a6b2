"""``mucudnn bench inference``: what kept filters bring, and other runtimes in comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from mucudnn.bench.report.export import write_json
from mucudnn.bench.suites.inference.runtime import Runtime
from mucudnn.cli.shared import options
from mucudnn.terminal.files import SOURCE, FileCommand
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.units import parse_bytes


def parse_runtimes(text: str) -> tuple[Runtime, ...]:
    """Read names of runtimes, all or none. Raises ``InvalidInputError``.

    >>> [runtime.value for runtime in parse_runtimes("openvino, mucudnn")]
    ['openvino', 'mucudnn']
    """
    if text in ("all", "none"):
        return tuple(Runtime) if text == "all" else ()
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in [*Runtime]:
            raise InvalidInputError(f"{name!r} is no runtime; allowed are {', '.join(Runtime)}, or all, or none")
    return tuple(map(Runtime, names))


@click.command(cls=FileCommand)
@click.argument("source", type=SOURCE)
@options.batch_of(1)
@options.input_shape
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
@click.option(
    "--runtimes",
    type=options.Text("NAME,...|none", parse_runtimes),
    default=tuple(Runtime),
    show_default="all",
    help=f"Compare calls of the whole network by these, each in a process of its own, in turns: {', '.join(Runtime)}.",
)
@click.option(
    "--fuse/--no-fuse",
    default=True,
    show_default=True,
    help="Whether ours in that comparison has batch norm, additions and ReLUs in its convolutions.",
)
@click.option("--layers/--no-layers", default=True, show_default=True, help="Time every convolution by itself.")
@options.json_file
@options.out_folder
def inference(
    source: str,
    batch: int,
    input_shape: tuple[int, int, int] | None,
    memory_format: MemoryFormat,
    rounds: int,
    threads: int | None,
    runtimes: tuple[Runtime, ...],
    fuse: bool,
    layers: bool,
    json_file: Path | None,
    out: Path | None,
    **choices: Any,
) -> None:
    """Inference of SOURCE: torch, mucudnn, and mucudnn with kept filters, whole and layer by layer.

    SOURCE is a network of mucudnn layers, or package.module:factory or file.py:factory, a function that returns your
    own torch model (with --input 3x224x224). Then torch, torch.compile with frozen parameters, ONNX Runtime, OpenVINO,
    mucudnn, and mucudnn under torch.compile take turns in calls of the whole model: images a second, and where layers
    are not compiled the share of each kind in the time. What is not installed (pip install 'mucudnn[runtimes]') is
    told, and the others go on. On the CPU, where alone filters are kept. What the folder of --out has already is not
    measured again.
    """
    if not (layers or runtimes):
        raise click.UsageError("nothing to measure: leave out --no-layers, or name --runtimes")
    import torch

    from mucudnn.bench.folders.writing import folder_if_named
    from mucudnn.bench.sources.layers import importable
    from mucudnn.bench.sources.networks import NETWORKS, arguments_for
    from mucudnn.bench.sources.trainable import settle_statistics, trainable_model
    from mucudnn.bench.suites.inference.benchmark import benchmark_inference
    from mucudnn.bench.suites.inference.comparison import compare_runtimes
    from mucudnn.bench.suites.inference.report import (
        inference_record,
        inference_table,
        runtime_kinds_table,
        runtimes_record,
        runtimes_table,
    )
    from mucudnn.bench.suites.inference.stored import FILTERS, RUNTIMES, InferenceFolder, header_of
    from mucudnn.kernels.contract.buffers import TORCH_FORMATS
    from mucudnn.measuring import operands
    from mucudnn.running.environment import current_environment
    from mucudnn.terminal.console import output, progress_bar
    from mucudnn.words.config import Config

    config = Config(**choices)
    options.use_threads(threads)
    torch.manual_seed(0)
    model, shape = trainable_model(source, input_shape=input_shape, memory_format=memory_format)
    x = torch.randn(operands.input_shape(batch, shape)).contiguous(memory_format=TORCH_FORMATS[memory_format])
    arguments = arguments_for(source, x)
    if source in NETWORKS:
        settle_statistics(model, arguments)
    console, record = output(), {}
    parts = [*([FILTERS] if layers else []), *(f"{RUNTIMES}: {runtime}" for runtime in runtimes)]
    named = source, tuple(x.shape), memory_format
    header = header_of(*named, replace(config, fuse=fuse), rounds, parts, current_environment())
    with folder_if_named(out, header) as folder, importable(source):  # processes inherit the path
        kept = InferenceFolder(folder, *named)
        if layers:
            with progress_bar() as progress:
                benchmark = benchmark_inference(
                    model.eval(), arguments, config, name=source, rounds=rounds, progress=progress, kept=kept
                )
            console.print(inference_table(benchmark))
            console.print(str(benchmark.environment))
            record = inference_record(benchmark)
        if runtimes:
            with progress_bar() as progress:
                comparison = compare_runtimes(
                    *(model.eval(), arguments, replace(config, fuse=fuse)),
                    name=source,
                    rounds=rounds,
                    runtimes=runtimes,
                    progress=progress,
                    kept=kept,
                )
            console.print(runtimes_table(comparison))
            if (kinds := runtime_kinds_table(comparison)) is not None:
                console.print(kinds)
            console.print(str(comparison.environment))
            record = runtimes_record(comparison) | record
        if folder is not None:
            folder.write_summary()
    if json_file is not None:
        write_json(json_file, record)
