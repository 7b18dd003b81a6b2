"""``mucudnn database``: show, export and merge measurements."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand
from mucudnn.cli.shared.parameters import INPUT_FILE, OutputFile
from mucudnn.core.files import whole_text
from mucudnn.core.values import format_bytes


@click.group()
def database() -> None:
    """The measurements: one SQLite file, in your cache folder unless --database or MUCUDNN_DATABASE names another."""


@database.command(cls=FileCommand)
@options.database
def info(database: Path | None) -> None:
    """Show the path of the database and the number of rows of each environment.

    Busy rows were measured while other programs took cores; the next tuning on a quiet machine measures them again.
    """
    from mucudnn.core.tables import new_table
    from mucudnn.core.terminal import output
    from mucudnn.store import schema
    from mucudnn.store.database import Database

    with Database(database, read_only=True) as opened:
        environments, path = opened.info(), opened.path
    size_bytes = path.stat().st_size if path.exists() else 0
    console = output()
    console.print(f"{path}: {format_bytes(size_bytes)}, schema version {schema.VERSION}")
    table = new_table("", ("environment",), ("measurements", "failures", "verifications", "timings", "busy"))
    for environment, *counts in environments:
        table.add_row(str(environment), *map(str, counts))
    console.print(table)


@database.command(cls=FileCommand)
@click.argument("target", type=OutputFile())
@options.database
def export(target: Path, database: Path | None) -> None:
    """Write all rows to FILE as JSON lines, one object a row."""
    if target.suffix.lower() == ".csv":
        raise click.UsageError(f"{target}: an export is lines of JSON, and no CSV; give a name that ends in .jsonl")
    from mucudnn.store.database import Database
    from mucudnn.store.exports import export_json_lines

    with Database(database, read_only=True) as opened, whole_text(target) as stream:
        export_json_lines(opened, stream)


@database.command(cls=FileCommand)
@click.argument("sources", metavar="OTHER...", nargs=-1, required=True, type=INPUT_FILE)
@options.database
def merge(sources: tuple[Path, ...], database: Path | None) -> None:
    """Add the rows of OTHER databases or exports, which are not changed.

    All of them are opened before the first row is added; of each, all rows are added or none. A missing database is
    created. An export with invalid values is refused.
    """
    from mucudnn.store.database import Database
    from mucudnn.store.exports import open_stored

    with ExitStack() as stack:
        stores = [stack.enter_context(open_stored(path)) for path in sources]
        opened = stack.enter_context(Database(database))
        for path, store in zip(sources, stores, strict=True):
            counts = opened.merge(store)
            click.echo(f"{path}: {counts['added']} rows added, {counts['known']} were there")
