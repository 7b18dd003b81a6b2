"""``mucudnn batch``: time and workspace per sample by batch size, with cliffs and the divisions that avoid them."""

from __future__ import annotations

from typing import Any

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.layer_tables import require_complete, tune_with_progress, tuning_environment
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand
from mucudnn.words.config import Config


@click.command(cls=FileCommand)
@options.source_argument
@options.option("up-to", parameters.Count(2, most=parameters.MOST_SOLVED), "The largest batch size of the sweep.", 64)
@options.input_shape
@options.dtype
@options.memory_format
@options.config(options.memory_bounds("64MiB"), *options.MEASURING, thorough=True)
@options.threads
@options.device
@options.flag("all", "Print every batch size, every problem and every cliff.", "everything")
@outputs("csv", "json", "plot")
def batch(
    source: str,
    up_to: int,
    device: str,
    everything: bool,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    """Show time and workspace per sample of SOURCE against batch size, undivided and divided.

    Cliffs are marked, where a larger batch is slower per sample, needs much more memory, or does not fit, each with the
    division of the batch that removes it. The micro-batch sizes of the policy up to --up-to are measured, and all other
    batch sizes are solved from them. The curves need each algorithm at every size, so that it always measures as with
    --thorough, which takes minutes. SOURCE is as for mucudnn tune; its own batch sizes are ignored.
    """
    from mucudnn.bench.analyses.batch_report import (
        cliffs_table,
        curves_table,
        draw_sweep,
        explanation,
        sweep_record,
        sweep_rows,
    )
    from mucudnn.bench.analyses.batch_sizes import require_sweepable, sweep_batch_sizes
    from mucudnn.bench.sources.layers import load_source

    require_sweepable(config)
    tuning_environment(device, config)  # fails early if the device is missing
    table = load_source(source, batch=up_to, **sizes)
    tuning = tune_with_progress(table, config, device)
    require_complete(tuning)
    sweep = sweep_batch_sizes(tuning, up_to)
    curves = sweep.distinct_curves if everything else sweep.distinct_curves[:1]
    outputs.tell(
        *(curves_table(sweep, one, every_size=everything) for one in curves),
        cliffs_table(sweep, every_cliff=everything),
        explanation(sweep),
        str(sweep.environment),
        rows=sweep_rows(sweep),
        record=sweep_record(sweep),
        figure=lambda: draw_sweep(sweep),
    )
