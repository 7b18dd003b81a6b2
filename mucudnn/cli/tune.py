"""``mucudnn tune``: measure the convolutions of a source, choose for each, and print what was chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mucudnn.cli import options


@click.command()
@options.source
@options.dtype
@options.memory_format
@options.choices(workspace_limit="64MiB")
@options.threads
@options.device
@options.json_file
def tune(
    source: str,
    batch: int | None,
    input_shape: tuple[int, int, int] | None,
    dtype: str,
    memory_format: Any,
    threads: int | None,
    device: str,
    json_file: Path | None,
    **choices: Any,
) -> None:
    """Measure the convolutions of SOURCE and choose micro-batches and algorithms for each.

    SOURCE is a network (alexnet, vgg16, resnet18, resnet50, googlenet), a built-in table (deepbench-train,
    deepbench-inference-server, deepbench-inference-device), a CSV file of layers, or package.module:factory, a function
    that returns your own torch model (with --input 3x224x224). What was measured before is not measured again.
    """
    from mucudnn.bench.console import output, progress_bar
    from mucudnn.bench.layers import load_source
    from mucudnn.bench.records import tuning_record
    from mucudnn.bench.report import tuning_table
    from mucudnn.bench.table_tuning import tune_table
    from mucudnn.config import Config
    from mucudnn.environment import current_environment

    config = Config(**choices)
    options.use_threads(threads)
    environment = current_environment(device)
    table = load_source(source, batch=batch, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
    with progress_bar() as progress:
        tuning = tune_table(table, config, device=device, progress=progress)
    console = output()
    console.print(tuning_table(tuning))
    console.print(str(environment))
    if json_file is not None:
        json_file.write_text(json.dumps(tuning_record(tuning, environment), indent=2) + "\n", encoding="utf-8")
    if tuning.interrupted:
        click.echo(
            f"Interrupted: {len(tuning.rows)} of {tuning.wanted} are ready. All measurements are kept; "
            "run the same command again to go on from there.",
            err=True,
        )
        raise KeyboardInterrupt
