"""``mucudnn solve``: choose from stored measurements, without measuring, for another limit or batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.layer_tables import load_limited, solve_stored
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import SOURCE, FileCommand, InputFile, OutputFile, whole_text
from mucudnn.words.config import Config


@click.command(cls=FileCommand)
@click.argument("stored", metavar="DATABASE|PROFILE", type=InputFile())
@click.option(
    "--network", metavar="NAME", required=True, type=SOURCE, help="Network to solve for; any SOURCE of mucudnn tune."
)
@options.batch()
@options.input_shape
@options.dtype
@options.memory_format
@options.config(options.memory_bounds("64MiB", headroom=True), *options.SOLVING)
@options.environment
@options.device
@click.option(
    "--write-lp",
    "program_file",
    metavar="FILE",
    type=OutputFile(suffix=(".lp", ".mps")),
    help="Also write the integer program of the budget to this file, for CBC, HiGHS, GLPK and other solvers.",
)
@outputs("json")
def solve(
    stored: Path,
    network: str,
    environment: str | None,
    device: str,
    program_file: Path | None,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    """Choose configurations for a network from stored measurements, without a device and without measuring.

    DATABASE is an SQLite file of mucudnn, PROFILE an export of mucudnn database export. Measurements of different
    environments (machine, threads, versions) are never mixed: --environment picks one. The result is the same as that
    of mucudnn tune; for a configuration without a stored whole run, its predicted time is used.
    """
    from mucudnn.bench.analyses.tuning_report import account_in_words, tuning_record, tuning_table
    from mucudnn.running.environment import current_environment

    if program_file is not None and config.workspace_budget is None:
        raise click.UsageError("--write-lp writes the program of a budget: give --workspace-budget, too")
    if config.has_headroom_limit:
        current_environment(device)  # fails early if the device is missing
    table, limits = load_limited(network, sizes, config, device)
    tuning, notes = solve_stored(stored, table, config, environment, limits)
    if program_file is not None and tuning.divided is not None:
        with whole_text(program_file) as stream:
            stream.write(tuning.divided.program(program_file.suffix.lower()))
    outputs.tell(
        tuning_table(tuning),
        account_in_words(tuning),
        f"measured on {tuning.environment}",
        record=tuning_record(tuning) | {"notes": notes},
    )
