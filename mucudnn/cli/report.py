"""``mucudnn report``: show a result folder as tables, CSV files, a web page or pictures."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand
from mucudnn.cli.shared.parameters import FOLDER, OutputFile

_SECOND = "operations"  # suffix of the second CSV file, which has a row per operation


@click.command(cls=FileCommand)
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option(
    "--html",
    "html_file",
    metavar="FILE.html",
    type=OutputFile(".html"),
    help="Write one self-contained page, with plots and with tables to sort and filter.",
)
@options.option(
    "csv",
    OutputFile(second=_SECOND),
    "Write the layers to this CSV file, in DeepBench's columns, and operations to a second file beside it.",
    variable="csv_file",
)
@options.option("pictures", FOLDER, "Write the pictures of the page into this folder, as SVG files.")
def report(folder: Path, html_file: Path | None, csv_file: Path | None, pictures: Path | None) -> None:
    """Show the result folder DIR, which a benchmark wrote with --out, or all result folders in DIR together.

    Nothing is measured: every number is computed from the stored samples.
    """
    from mucudnn.bench.results.pages import page
    from mucudnn.core.files import beside, whole_text, write_each
    from mucudnn.core.tables import listed
    from mucudnn.core.terminal import output

    def write_html(path: Path) -> None:
        text = page.html_of(reports)
        with whole_text(path) as stream:
            stream.write(text)

    def write_pictures(path: Path) -> None:
        files = page.write_pictures_of(reports, path)
        console.print("\n".join(map(str, files)) or f"{folder} has nothing to draw", soft_wrap=True)

    reports = page.reports_in(folder)
    console = output()
    for name, folder_report in reports.by_name.items():
        if reports.only is None:
            console.print(f"{name}: {folder_report.title}", soft_wrap=True)
        if folder_report.tables:
            console.print(folder_report.tables[0])
        missing = (f"{reason}: {listed(things, 3, '; ')}" for reason, things in folder_report.missing.items())
        console.print("\n".join(missing), soft_wrap=True)
        console.print(str(folder_report.folder.header.environment))
    for message in reports.unreadable:
        console.print(f"not shown: {message}", soft_wrap=True)
    write_each(
        (html_file, write_html),
        (csv_file, lambda path: page.write_layers(reports.joined(lambda report: report.layers), path)),
        (
            csv_file and beside(csv_file, _SECOND),
            lambda path: page.write_frame(reports.joined(lambda report: report.rows), path),
        ),
        (pictures, write_pictures),
    )
