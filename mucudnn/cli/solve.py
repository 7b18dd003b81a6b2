"""``mucudnn solve``: choose again from stored measurements, for other memory or another batch, without measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mucudnn.bench.report.export import write_json
from mucudnn.cli.shared import options
from mucudnn.cli.shared.layer_tables import load_limited, solve_stored
from mucudnn.terminal.files import SOURCE, FileCommand, InputFile


@click.command(cls=FileCommand)
@click.argument("stored", metavar="DATABASE|PROFILE", type=InputFile())
@click.option(
    "--network", metavar="NAME", required=True, type=SOURCE, help="Whose convolutions; any SOURCE of mucudnn tune."
)
@options.batch
@options.input_shape
@options.dtype
@options.memory_format
@options.memory_bounds(workspace_limit="64MiB", headroom=True)
@options.policy
@options.operations
@options.algorithms
@options.max_relative_error
@options.strict
@options.environment
@options.device_of("Where the training step is whose headroom is asked for.")
@options.json_file
def solve(
    stored: Path,
    network: str,
    environment: str | None,
    device: str,
    json_file: Path | None,
    **rest: Any,
) -> None:
    """Choose for the convolutions of a network from what is stored, without a device and without measuring.

    DATABASE is an SQLite file of mucudnn, PROFILE what mucudnn database export wrote. Measurements of several
    environments (machine, threads, versions) are never mixed: --environment picks one. The answer is that of mucudnn
    tune; where no whole run of a configuration is stored, its predicted time counts.
    """
    from mucudnn.bench.analyses.tuning_report import account_in_words, tuning_record, tuning_table
    from mucudnn.running.environment import current_environment
    from mucudnn.terminal.console import output
    from mucudnn.words.config import Config

    sizes = options.pop_sizes(rest)
    config = Config(**rest)
    if config.has_headroom_limit:
        current_environment(device)  # says what is missing for it
    table, limits = load_limited(network, sizes, config, device)
    replayed = solve_stored(stored, table, config, environment, limits)
    console = output()
    console.print(tuning_table(replayed.tuning))
    console.print(account_in_words(replayed.tuning))
    console.print(f"measured on {replayed.tuning.environment}")
    if json_file is not None:
        record = tuning_record(replayed.tuning) | {"notes": replayed.notes}
        write_json(json_file, record)
