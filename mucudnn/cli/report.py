"""``mucudnn report``: show a result folder as tables, CSV files, a web page or pictures."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand
from mucudnn.cli.shared.parameters import Folder, OutputFile

_SECOND = "operations"  # suffix of the second CSV file, which has a row per operation


@click.command(cls=FileCommand)
@click.argument("folder", metavar="DIR", type=Folder())
@click.option(
    "--html",
    "html_file",
    metavar="FILE.html",
    type=OutputFile(suffix=".html"),
    help="Write one self-contained page, with plots and with tables to sort and filter.",
)
@options.option(
    "csv",
    OutputFile(second=_SECOND),
    "Write the layers to this CSV file, in DeepBench's columns, and operations to a second file beside it.",
    variable="csv_file",
)
@options.option("pictures", Folder(), "Write the pictures of the page into this folder, as SVG files.")
def report(folder: Path, html_file: Path | None, csv_file: Path | None, pictures: Path | None) -> None:
    """Show the result folder DIR, which a benchmark wrote with --out, or all result folders in DIR together.

    Nothing is measured: every number is computed from the stored samples.
    """
    from mucudnn.bench.results.pages import page
    from mucudnn.core.files import beside, whole_text, write_each
    from mucudnn.core.tables import listed
    from mucudnn.core.terminal import output

    def write_html(path: Path) -> None:
        text = page.html_of(found)
        with whole_text(path) as stream:
            stream.write(text)

    def write_pictures(path: Path) -> None:
        files = page.write_pictures_of(found, path)
        console.print("\n".join(map(str, files)) or f"{folder} has nothing to draw", soft_wrap=True)

    found = page.reports_in(folder)
    console = output()
    for name, one in found.by_name.items():
        if found.only is None:
            console.print(f"{name}: {one.title}", soft_wrap=True)
        if one.tables:
            console.print(one.tables[0])
        missing = (f"{reason}: {listed(things, 3, '; ')}" for reason, things in one.missing.items())
        console.print("\n".join(missing), soft_wrap=True)
        console.print(str(one.folder.header.environment))
    for message in found.unreadable:
        console.print(f"not shown: {message}", soft_wrap=True)
    write_each(
        (html_file, write_html),
        (csv_file, lambda path: page.write_layers(found.joined(lambda one: one.layers), path)),
        (
            csv_file and beside(csv_file, _SECOND),
            lambda path: page.write_frame(found.joined(lambda one: one.rows), path),
        ),
        (pictures, write_pictures),
    )
