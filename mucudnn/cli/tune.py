"""``mucudnn tune``: measure the convolutions of a source, choose a configuration for each, and print them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mucudnn.bench.sources.networks import NETWORKS
from mucudnn.bench.sources.published import TABLES
from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand, Outputs
from mucudnn.cli.shared.layer_tables import load_limited
from mucudnn.cli.shared.options import outputs
from mucudnn.cli.shared.parameters import OutputFile
from mucudnn.cli.shared.ranks import tune_on_ranks
from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.files import whole_text

if TYPE_CHECKING:
    from mucudnn.bench.sources.layers import LayerTable
    from mucudnn.bench.sources.table_tuning import TableTuning
    from mucudnn.tuning.headroom import Limits

_HELP = f"""Measure the convolutions of SOURCE and choose micro-batches and algorithms for each.

SOURCE is a network ({", ".join(NETWORKS)}), a built-in table ({", ".join(TABLES)}), a CSV file of layers, or
package.module:factory or file.py:factory, a function that returns your own PyTorch model (with --input 3x224x224).
Stored measurements are reused. Only candidates that fit the limit or budget are measured, with --thorough too: tune
with the largest that you will ask for.

With --stored, nothing is measured: the choice is from the stored measurements of one environment (machine, threads,
versions), and is that of a tuning with the same options; a configuration that was never run whole has its predicted
time.

Under torchrun (torchrun --nproc-per-node 4 -m mucudnn tune SOURCE), the measuring is divided among the ranks.
"""


@click.command(cls=FileCommand, help=_HELP)
@options.source
@options.dtype
@options.memory_format
@options.config(options.memory_bounds("64MiB", headroom=True), *options.MEASURING, "share_tuning")
@options.known_threads
@options.known_device
@options.flag("stored", "Choose from --database, a database or an export of one, without measuring.")
@options.environment
@options.flag("curve", "Also show the least time with more or less budget, or limit.")
@click.option(
    "--write-lp",
    "program_file",
    metavar="FILE",
    type=OutputFile(suffix=(".lp", ".mps")),
    help="Also write the integer program of the budget to this file, for CBC, HiGHS, GLPK and other solvers.",
)
@outputs("json")
def tune(
    source: str,
    threads: int | None,
    device: str,
    stored: bool,
    environment: str | None,
    curve: bool,
    program_file: Path | None,
    outputs: Outputs,
    config: Config,
    **sizes: Any,
) -> None:
    from mucudnn.bench.results.tuning_report import account_in_words, curve_table, time_by_size, tuning_record
    from mucudnn.bench.results.tuning_report import tuning_table as table_of

    if program_file is not None and config.workspace_budget is None:
        raise click.UsageError("--write-lp writes the program of a budget: give --workspace-budget, too")
    if environment is not None and not stored:
        raise click.UsageError("--environment picks from stored measurements: give --stored, too")
    if curve and config.has_headroom_limit:
        raise click.UsageError("--curve is of one budget or limit, and the headroom is one for each module")
    if stored:
        table, limits = load_limited(source, sizes, config, device)
        tuning = solve_stored(table, config, environment, limits)
    else:
        found = tune_on_ranks(source, sizes, config, threads, device)
        if found is None:
            return
        tuning = found
    if program_file is not None and tuning.divided is not None:
        with whole_text(program_file) as stream:
            stream.write(tuning.divided.program(program_file.suffix.lower()))
    points = time_by_size(tuning) if curve and not tuning.interrupted else ()
    outputs.tell(
        table_of(tuning),
        "" if tuning.interrupted else account_in_words(tuning),
        *([curve_table(tuning, points)] if points else ()),
        str(tuning.environment),
        record=tuning_record(tuning, points),
    )
    if tuning.interrupted:
        raise KeyboardInterrupt(f"{len(tuning.rows)} of {tuning.wanted} are ready")


def solve_stored(
    table: LayerTable, config: Config, environment: str | None, limits: Limits | None = None
) -> TableTuning:
    """Choose configurations for a table from the measurements in the config's database, without measuring.

    environment: number of the environment to use, or part of its description; None for the only one. Prints what the
    measurements lack.
    """
    from mucudnn.bench.sources.table_tuning import of_table, table_tasks
    from mucudnn.store.database import default_path
    from mucudnn.store.exports import open_stored
    from mucudnn.store.selection import select_measurements
    from mucudnn.tuning.replay import replay, shortcomings

    with open_stored(config.database or default_path()) as database:
        tasks = table_tasks(table, config, limits)
        found = select_measurements(
            database,
            tasks,
            BatchSizePolicy(config.policy),
            algorithms=config.algorithms,
            strict=config.strict,
            environment=environment,
        )
        for note in shortcomings(tasks, found, BatchSizePolicy(config.policy)):
            click.echo(f"Note: {note}", err=True)
        return of_table(table, replay(tasks, config, found))
