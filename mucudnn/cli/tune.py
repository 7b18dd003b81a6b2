"""``mucudnn tune``: measure the convolutions of a source, choose a configuration for each, and print them."""

from __future__ import annotations

from typing import Any

import click

from mucudnn.bench.sources.networks import NETWORKS
from mucudnn.bench.sources.published import TABLES
from mucudnn.cli.shared import options
from mucudnn.cli.shared.layer_tables import require_complete
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.cli.shared.ranks import TuneTable, tune_on_ranks
from mucudnn.terminal.files import FileCommand
from mucudnn.words.config import Config

_HELP = f"""Measure the convolutions of SOURCE and choose micro-batches and algorithms for each.

SOURCE is a network ({", ".join(NETWORKS)}), a built-in table ({", ".join(TABLES)}), a CSV file of layers, or
package.module:factory or file.py:factory, a function that returns your own PyTorch model (with --input 3x224x224).
Stored measurements are reused.

Under torchrun (torchrun --nproc-per-node 4 -m mucudnn tune SOURCE), the measuring is divided among the ranks.
"""


@click.command(cls=FileCommand, help=_HELP)
@options.source
@options.dtype
@options.memory_format
@options.config(options.memory_bounds("64MiB", headroom=True), *options.MEASURING, "share_tuning")
@options.known_threads
@options.known_device
@outputs("json")
def tune(
    source: str,
    threads: int | None,
    device: str,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    from mucudnn.bench.analyses.tuning_report import account_in_words, tuning_record, tuning_table

    tuning = tune_on_ranks(TuneTable(source, sizes, config, threads, device))
    if tuning is None:
        return
    outputs.tell(
        tuning_table(tuning),
        "" if tuning.interrupted else account_in_words(tuning),
        str(tuning.environment),
        record=tuning_record(tuning),
    )
    require_complete(tuning)
