"""``mucudnn database``: show, export, merge, prune and refresh measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mucudnn.cli.shared import options, parameters
from mucudnn.cli.shared.outputs import Outputs, outputs
from mucudnn.terminal.files import FileCommand, InputFile, OutputFile, whole_text
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from mucudnn.database.rows import EnvironmentRows
    from mucudnn.running.environment import Environment
    from mucudnn.tuning.refresh import Refreshed
    from mucudnn.words.problem import Operation


class ExportFormat(StrEnum):
    """File formats of exported measurements; the values are those of ``--format``."""

    CSV = "csv"
    JSON_LINES = "json-lines"


SUFFIXES = {".csv": ExportFormat.CSV, ".jsonl": ExportFormat.JSON_LINES, ".ndjson": ExportFormat.JSON_LINES}


@click.group()
def database() -> None:
    """The measurements: one SQLite file, in your cache folder unless --database or MUCUDNN_DATABASE names another."""


@database.command(cls=FileCommand)
@options.database
def info(database: Path | None) -> None:
    """Show the path of the database and the number of rows of each environment.

    Doubtful rows are measurements and verifications that mucudnn database refresh would repeat.
    """
    from mucudnn.database import schema
    from mucudnn.database.database import Database
    from mucudnn.terminal.console import output

    with Database(database, read_only=True) as opened:
        found, path = opened.info(), opened.path
    size_bytes = path.stat().st_size if path.exists() else 0
    console = output()
    console.print(f"{path}: {format_bytes(size_bytes)}, schema version {schema.VERSION}")
    console.print(info_table(found))


@database.command(cls=FileCommand)
@click.argument("target", type=OutputFile())
@options.option(
    "format",
    parameters.choice(ExportFormat),
    "Default: by the suffix, .csv or .jsonl.",
    variable="export_format",
)
@options.database
def export(target: Path, export_format: ExportFormat | None, database: Path | None) -> None:
    """Write all rows to FILE, as CSV or JSON lines."""
    from mucudnn.database.database import Database
    from mucudnn.database.exports import export_csv, export_json_lines

    chosen = export_format or SUFFIXES.get(target.suffix.lower())
    if chosen is None:
        raise InvalidInputError(
            f"the suffix of {target} is not one of {', '.join(SUFFIXES)}: use one, or add --format csv or "
            "--format json-lines"
        )
    with Database(database, read_only=True) as opened, whole_text(target) as stream:
        (export_csv if chosen is ExportFormat.CSV else export_json_lines)(opened, stream)


@database.command(cls=FileCommand)
@click.argument("others", metavar="OTHER...", nargs=-1, required=True, type=InputFile())
@options.database
def merge(others: tuple[Path, ...], database: Path | None) -> None:
    """Add the rows of OTHER databases or exports (CSV or JSON lines), which are not changed.

    All of them are opened before the first row is added; of each, all rows are added or none. A missing database is
    created. An export with invalid values is refused.
    """
    from mucudnn.database.database import Database
    from mucudnn.database.exports import open_stored

    with ExitStack() as stack:
        sources = [stack.enter_context(open_stored(other)) for other in others]
        opened = stack.enter_context(Database(database))
        for other, source in zip(others, sources, strict=True):
            counts = opened.merge(source)
            click.echo(f"{other}: {counts.added} rows added, {counts.known} were there")


@database.command(cls=FileCommand)
@options.flag("other-environments", "Also remove rows of other machines, library versions, threads and settings.")
@options.flag("other-versions", "Also remove rows of other versions of the algorithms.")
@options.flag("failures", "Also remove failures, so that they are tried again.")
@options.flag("dry-run", "Remove nothing, only print how many rows would be removed.")
@options.database
def prune(other_environments: bool, other_versions: bool, failures: bool, dry_run: bool, database: Path | None) -> None:
    """Remove the rows that newer ones supersede."""
    from mucudnn.database.database import Database
    from mucudnn.kernels.registry import algorithm_versions

    environments = [*environments_here()] if other_environments else None
    versions = algorithm_versions() if other_versions else None
    with Database(database, create=False) as opened:
        removed = opened.prune(environments=environments, versions=versions, failures=failures, dry_run=dry_run)
    click.echo(f"{removed} rows " + ("would be removed" if dry_run else "removed"))


@database.command(cls=FileCommand)
@options.flag("all", "Measure everything again, not only doubtful rows.", "everything")
@click.option(
    "--older-than",
    "days",
    type=parameters.Finite(min=0),
    metavar="DAYS",
    help="Also repeat older rows.",
)
@options.threads
@options.device
@options.database
def refresh(everything: bool, days: float | None, device: str, database: Path | None) -> None:
    """Repeat doubtful measurements: those that are very noisy, or were made while other processes were busy.

    Only measurements of this machine with this number of threads are repeated, once the machine is quiet, for which the
    command waits a minute at most. Each result is stored at once, so that Ctrl-C loses nothing. Choices change with the
    next tuning, which reads the new times.
    """
    from datetime import timedelta

    from mucudnn.database.database import Database
    from mucudnn.measuring.whole_runs import Machine
    from mucudnn.tuning.refresh import refresh as measure_again
    from mucudnn.words.progress import progress_bar

    older_than = None if days is None else timedelta(days=days)
    with Database(database, create=False) as opened, progress_bar() as progress:
        machine = Machine.current(device)
        found = measure_again(opened, machine, everything=everything, older_than=older_than, progress=progress)
    _print_refreshed(found)


def _print_refreshed(found: Refreshed) -> None:
    """Print the results of repeating measurements.

    Raises ``UnavailableError`` if the machine was too busy, and ``KeyboardInterrupt`` if Ctrl-C was pressed.
    """
    from mucudnn.bench.analyses.tuning_report import measurements_table, refresh_in_words, whole_runs_table
    from mucudnn.terminal.console import output
    from mucudnn.words.errors import UnavailableError

    console = output()
    if found.measurements:
        console.print(measurements_table(found))
    if found.whole_runs:
        console.print(whole_runs_table(found))
    console.print(refresh_in_words(found))
    if found.interrupted:
        raise KeyboardInterrupt(f"{found.left} of {found.doubtful} are left as they were")
    if found.busy:
        raise UnavailableError(f"the machine is busy: {found.busy}; end other processes, and refresh again")


@database.command(cls=FileCommand)
@click.argument("problem", nargs=-1, type=parameters.Text("PROBLEM", str.strip))
@options.operations
@options.option(
    "algorithms",
    parameters.Text("NAME,...", parameters.parse_names),
    "Only measurements of these, and whole runs with one of them; default: all.",
)
@options.environment
@options.flag("all", "Also show superseded rows.", "everything")
@options.database
@outputs("csv", "json")
def samples(
    problem: tuple[str, ...],
    operations: tuple[Operation, ...],
    algorithms: tuple[str, ...] | None,
    environment: str | None,
    everything: bool,
    database: Path | None,
    outputs: Outputs,
) -> None:
    """Show the raw samples of each measurement and whole run, and the state of the machine meanwhile.

    PROBLEM is part of a convolution's description, such as 64x56x56, 3x3 or float32; several must all match. The table
    summarizes the samples; --csv writes a line per sample, and --json a list per measurement. Samples of setups, steps,
    baselines and whole runs are seconds per call, in the order in which they were taken; samples of a whole run and of
    its baseline with the same number ran in the same round.
    """
    from mucudnn.bench.report import samples as report
    from mucudnn.database.database import Database

    with Database(database, read_only=True) as opened:
        every = opened.every_row() if everything else opened.rows_that_count()
        environments = chosen_environments(opened.environments(), environment)
    rows = report.wanted(every, environments, operations, algorithms, problem)
    if not rows:
        raise InvalidInputError("no stored row matches; ask for less, or see mucudnn database info")
    series = [*report.series(rows)]
    by_environment = [(one, [each for each in series if report.environment_of(each) == one]) for one in environments]
    outputs.tell(
        *(report.samples_table(one, of_one) for one, of_one in by_environment if of_one),
        report.in_words(rows),
        rows=report.sample_rows(series),
        record=report.samples_record(series),
    )


def chosen_environments(every: Sequence[Environment], text: str | None) -> list[Environment]:
    """Return the environments whose number is ``text`` or whose description contains it; all for None.

    Raises ``InvalidInputError`` if no environment matches.
    """
    from mucudnn.database.selection import numbers_of

    numbered = dict(enumerate(every, start=1))
    numbers = [*numbered] if text is None else numbers_of(numbered, text)
    if not numbers and text is not None:
        listed = "".join(f"\n  {number}: {one}" for number, one in numbered.items())
        raise InvalidInputError(f"environment is {text!r}, which is none of those stored:{listed}")
    return [numbered[number] for number in numbers]


def environments_here() -> Iterator[Environment]:
    """Yield the environment (machine and libraries) of the CPU, and of the GPU if one is available."""
    from mucudnn.running.environment import current_environment
    from mucudnn.words.errors import UnavailableError

    yield current_environment("cpu")
    with suppress(UnavailableError):
        yield current_environment("cuda")


def info_table(environments: Sequence[EnvironmentRows]) -> Table:
    """Return a table with a row for each environment: numbers of stored measurements, failures and other rows."""
    from rich.table import Table

    table = Table("environment")
    for heading in ("measurements", "failures", "verifications", "confirmations", "doubtful"):
        table.add_column(heading, justify="right")
    for rows in environments:
        counts = (rows.measurements, rows.failures, rows.verifications, rows.confirmations, rows.doubtful)
        table.add_row(str(rows.environment), *map(str, counts))
    return table
