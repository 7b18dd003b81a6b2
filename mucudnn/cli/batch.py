"""``mucudnn batch``: time and workspace per sample against batch size, the cliffs, and the cuts that remove them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mucudnn.bench.report.export import write_csv, write_each, write_json
from mucudnn.cli.shared import options
from mucudnn.cli.shared.layer_tables import require_complete, tune_with_progress, tuning_environment
from mucudnn.terminal.files import FileCommand


@click.command(cls=FileCommand)
@options.source_argument
@click.option(
    "--up-to",
    type=options.Count(2, most=options.MOST_SOLVED),
    default=64,
    show_default=True,
    help="The largest batch size of the sweep.",
)
@options.input_shape
@options.dtype
@options.memory_format
@options.choices(workspace_limit="64MiB")
@options.threads
@options.device
@click.option("--all", "everything", is_flag=True, help="Print every batch size, every problem and every cliff.")
@options.csv_file
@options.json_file
@options.plot_file
def batch(
    source: str,
    up_to: int,
    input_shape: tuple[int, int, int] | None,
    dtype: str,
    memory_format: Any,
    threads: int | None,
    device: str,
    everything: bool,
    csv_file: Path | None,
    json_file: Path | None,
    plot_file: Path | None,
    **choices: Any,
) -> None:
    """Show time and workspace per sample of SOURCE against batch size, undivided and divided.

    Cliffs are marked: a larger batch that is slower per sample, needs a jump in memory, or does not fit; with the cut
    that removes each. The micro-batch sizes of the policy up to --up-to are measured, all other batch sizes are solved
    from them. The curves need each algorithm at every size: so it always measures as with --thorough, which takes
    minutes. SOURCE is as for mucudnn tune; batch sizes of its own are not used.
    """
    from mucudnn.bench.analyses.batch_plot import draw_sweep
    from mucudnn.bench.analyses.batch_report import cliffs_table, curves_table, explanation, sweep_record, sweep_rows
    from mucudnn.bench.analyses.batch_sizes import require_sweepable, sweep_batch_sizes
    from mucudnn.bench.report.plots import require_matplotlib, save_png
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.terminal.console import output
    from mucudnn.words.config import Config

    config = Config(**{**choices, "thorough": True})  # the curves are of every algorithm at every size
    require_sweepable(config)
    if plot_file is not None:
        require_matplotlib()
    options.use_threads(threads)
    tuning_environment(device, config)  # before a model is built for a device that is not there
    table = load_source(source, batch=up_to, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
    tuning = tune_with_progress(table, config, device)
    require_complete(tuning)
    sweep = sweep_batch_sizes(tuning, up_to)
    console = output()
    for curves in sweep.distinct_curves if everything else sweep.distinct_curves[:1]:
        console.print(curves_table(sweep, curves, every_size=everything))
    console.print(cliffs_table(sweep, every_cliff=everything))
    console.print(explanation(sweep))
    console.print(str(sweep.environment))
    write_each(
        (csv_file, lambda path: write_csv(path, sweep_rows(sweep))),
        (json_file, lambda path: write_json(path, sweep_record(sweep))),
        (plot_file, lambda path: save_png(draw_sweep(sweep), path)),
    )
