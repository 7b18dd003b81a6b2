"""``mucudnn tune``: measure the convolutions of a source, choose for each, and print what was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mucudnn.bench.report.export import write_json
from mucudnn.cli.shared import options
from mucudnn.cli.shared.layer_tables import require_complete
from mucudnn.cli.shared.ranks import TuneTable, tune_on_ranks
from mucudnn.terminal.files import FileCommand


@click.command(cls=FileCommand)
@options.source
@options.dtype
@options.memory_format
@options.choices(workspace_limit="64MiB", headroom=True)
@options.threads
@options.known_device
@options.devices
@options.share_tuning
@options.json_file
def tune(
    source: str,
    threads: int | None,
    device: str,
    devices: tuple[str, ...],
    json_file: Path | None,
    **rest: Any,
) -> None:
    """Measure the convolutions of SOURCE and choose micro-batches and algorithms for each.

    SOURCE is a network (alexnet, vgg16, vgg19, resnet18, resnet50, googlenet, squeezenet, mobilenetv2, efficientnet-b0,
    convnext-t, regnety-400mf, densenet40, segformer-b0, unet, vae), a built-in table (deepbench-train,
    deepbench-inference-server, deepbench-inference-device), a CSV file of layers, or package.module:factory or
    file.py:factory, a function that returns your own torch model (with --input 3x224x224). What was measured before is
    not measured again.

    With --devices, or under torchrun (torchrun --nproc-per-node 4 -m mucudnn tune SOURCE), the measuring is dealt out
    over several devices.
    """
    from mucudnn.bench.analyses.tuning_report import account_in_words, tuning_record, tuning_table
    from mucudnn.terminal.console import output
    from mucudnn.words.config import Config

    sizes = options.pop_sizes(rest)
    config = Config(**rest)
    tuning = tune_on_ranks(TuneTable(source, sizes, config, threads), device, devices)
    if tuning is None:
        return
    console = output()
    console.print(tuning_table(tuning))
    if not tuning.interrupted:
        console.print(account_in_words(tuning))
    console.print(str(tuning.environment))
    if json_file is not None:
        write_json(json_file, tuning_record(tuning))
    require_complete(tuning)
