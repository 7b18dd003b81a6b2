"""``mucudnn solve``: choose again from stored measurements, for other memory or another batch, without measuring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from mucudnn.cli import options


@click.command()
@click.argument("stored", metavar="DATABASE|PROFILE", type=click.Path(path_type=Path))
@click.option("--network", required=True, metavar="NAME", help="Whose convolutions; any SOURCE of mucudnn tune.")
@options.batch
@options.input_shape
@options.dtype
@options.memory_format
@options.memory_bounds(workspace_limit="64MiB")
@options.policy
@options.operations
@options.algorithms
@options.max_relative_error
@options.environment
@options.json_file
def solve(
    stored: Path,
    network: str,
    batch: int | None,
    input_shape: tuple[int, int, int] | None,
    dtype: str,
    memory_format: Any,
    environment: str | None,
    json_file: Path | None,
    **choices: Any,
) -> None:
    """Choose for the convolutions of a network from what is stored, without a device and without measuring.

    DATABASE is an SQLite file of mucudnn, PROFILE what mucudnn database export wrote. Measurements of several
    environments (machine, threads, versions) are never mixed: --environment picks one. The answer is that of mucudnn
    tune; where no whole run of a configuration is stored, its predicted time counts.
    """
    from mucudnn.bench.console import output
    from mucudnn.bench.layers import load_source
    from mucudnn.bench.records import tuning_record
    from mucudnn.bench.report import tuning_table
    from mucudnn.bench.table_tuning import of_table, table_tasks
    from mucudnn.config import BatchSizePolicy, Config
    from mucudnn.profile_file import open_stored
    from mucudnn.replay import replay
    from mucudnn.stored import stored_measurements

    config = Config(**choices)
    with open_stored(stored) as database:
        table = load_source(network, batch=batch, input_shape=input_shape, dtype=dtype, memory_format=memory_format)
        tasks = table_tasks(table, config)
        found = stored_measurements(
            database, tasks, BatchSizePolicy(config.policy), algorithms=config.algorithms, environment=environment
        )
        for note in found.notes:
            click.echo(f"Note: {note}", err=True)
        tuning = of_table(table, replay(tasks, config, found))
    console = output()
    console.print(tuning_table(tuning))
    if tuning.divided is not None:
        console.print(str(tuning.divided.division))
    console.print(f"measured on {found.environment}")
    if json_file is not None:
        record = tuning_record(tuning, found.environment) | {"notes": found.notes}
        json_file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
