"""``mucudnn report``: what a result folder has, as a page, a table for programs, or text."""

from __future__ import annotations

from pathlib import Path

import click

from mucudnn.terminal.command_files import FileCommand, InputFolder, OutputFile

_SECOND = "operations"  # what is beside the layers of --csv


@click.command(cls=FileCommand)
@click.argument("folder", metavar="DIR", type=InputFolder("DIR", or_file=True))
@click.option(
    "--html",
    "html_file",
    type=OutputFile("FILE.html", suffix=".html"),
    help="Write one page that needs nothing else: tables to sort and to filter, and pictures.",
)
@click.option(
    "--csv",
    "csv_file",
    type=OutputFile(second=_SECOND),
    help="Write the layers to this CSV file, in DeepBench's columns, and each operation beside it.",
)
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
def report(folder: Path, html_file: Path | None, csv_file: Path | None, markdown: bool) -> None:
    """Show the result folder DIR, which a benchmark wrote with --out.

    Nothing is measured: every number is computed from the stored samples. DIR may also be a file that a benchmark wrote
    with --json: it has medians alone.
    """
    from mucudnn.bench.folders.reading import read_folder
    from mucudnn.bench.folders.result_files import read_result_file
    from mucudnn.bench.pages import text
    from mucudnn.bench.pages.page import html_of, report_of
    from mucudnn.bench.pages.pictures.drawn import pictures_or_reason
    from mucudnn.bench.report.export import write_each
    from mucudnn.terminal.console import output
    from mucudnn.terminal.whole_files import beside, whole_text

    def write_html(path: Path) -> None:
        page = html_of(found, *pictures_or_reason(found.material))
        with whole_text(path) as stream:
            stream.write(page)

    found = report_of(read_result_file(folder) if folder.is_file() else read_folder(folder))
    console = output()
    if markdown:
        console.print(text.markdown_of(found), soft_wrap=True)
    else:
        if found.tables:
            console.print(text.printed_table(found.tables[0]))
        console.print(text.missing_in_words(found), soft_wrap=True)
        console.print(str(found.folder.header.environment))
    write_each(
        (html_file, write_html),
        (csv_file, lambda path: text.write_layers(found.layers, path)),
        (csv_file and beside(csv_file, _SECOND), lambda path: text.write_frame(found.rows, path)),
    )
