"""Reports of all result folders in a path, as one HTML page, terminal output, CSV, or pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas

import mucudnn
from mucudnn.bench.results.pages.measured import OPERATIONS
from mucudnn.bench.results.pages.pictures import pictures_or_reason, write_pictures
from mucudnn.bench.results.pages.report import Report, report_of
from mucudnn.bench.results.pages.tables import DEEPBENCH, TextTable
from mucudnn.bench.results.reading import HEADER_FILE, folders_below, read_folder
from mucudnn.core.errors import InvalidInputError, OutputError, UnavailableError
from mucudnn.core.files import whole_text
from mucudnn.core.tables import Table, listed, new_table

RESULT_FOLDER = "result_folder"  # the column that names the folder of a row
# Columns that are not written to CSV files.
_INNER = ("format_version", "folder", "samples_s", "torch_samples_s")


@dataclass(frozen=True, slots=True, eq=False)
class Reports:
    """The reports of the result folders in a path, by folder name. unreadable: the errors of skipped folders."""

    path: Path
    by_name: dict[str, Report]
    unreadable: tuple[str, ...] = ()

    @property
    def only(self) -> Report | None:
        """The single report, or None if the path has several result folders or one was skipped."""
        return next(iter(self.by_name.values())) if len(self.by_name) == 1 and not self.unreadable else None

    def joined(self, frame_of: Callable[[Report], pandas.DataFrame]) -> pandas.DataFrame:
        """Concatenate one data frame of each report. The column ``RESULT_FOLDER`` names the report's folder.

        If there is only one report, return its frame without that column.
        """
        if self.only is not None:
            return frame_of(self.only)
        frames = {name: frame_of(report).dropna(axis=1, how="all") for name, report in self.by_name.items()}
        named = [frame.assign(**{RESULT_FOLDER: name}) for name, frame in frames.items() if len(frame)]
        rows = pandas.concat(named, ignore_index=True) if named else pandas.DataFrame({RESULT_FOLDER: []})
        return rows[[RESULT_FOLDER, *rows.columns.drop(RESULT_FOLDER)]]


def reports_in(path: Path) -> Reports:
    """Read the reports in a path: a result folder, or a folder of result folders.

    Unreadable result folders are skipped. Raises ``InvalidInputError`` if nothing can be read.
    """
    folders = [] if (path / HEADER_FILE).exists() else folders_below(path)
    if not folders:
        return Reports(path, {path.name: report_of(read_folder(path))})
    found: dict[str, Report] = {}
    unreadable = []
    for folder in folders:
        try:
            found[str(folder.relative_to(path))] = report_of(read_folder(folder))
        except InvalidInputError as error:
            unreadable.append(str(error))
    if not found:
        raise InvalidInputError("\n".join(unreadable))
    return Reports(path, found, tuple(unreadable))


def html_of(reports: Reports, *, with_pictures: bool = True) -> str:
    """Return one HTML page with all reports, each in a section of its own if there are several.

    Raises ``UnavailableError`` if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise UnavailableError("the page needs jinja2, which is not installed: pip install 'mucudnn[report]'") from None
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    parts = [
        (name, report, *(pictures_or_reason(report) if with_pictures else ([], "")))
        for name, report in reports.by_name.items()
    ]
    only, version = reports.only, mucudnn.__version__
    return jinja.get_template("page.html").render(reports=reports, only=only, parts=parts, version=version)


def write_pictures_of(reports: Reports, folder: Path) -> list[Path]:
    """Write the pictures of all reports as SVG files; return the files. Several reports have a folder each.

    Raises ``UnavailableError`` if matplotlib is not installed, and ``OutputError`` if a file cannot be written.
    """
    files = []
    for name, report in reports.by_name.items():
        place = folder if reports.only is report else folder / name
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{place} cannot be created: {error.strerror}; name another folder") from error
        files += write_pictures(report, place)
    return files


def printed_table(table: TextTable) -> Table:
    """Convert a table of a report to one for the terminal."""
    titles = [column.title for column in table.columns]
    are_text = next((index for index, column in enumerate(table.columns) if column.form), len(titles))
    printed = new_table(table.title, tuple(titles[:are_text]), titles[are_text:])
    for row in table.rows:
        printed.add_row(*row)
    return printed


def missing_in_words(report: Report) -> str:
    """Return a line for each reason for which items are missing in the report; empty if nothing is missing."""
    return "\n".join(f"{reason}: {listed(things, 3, '; ')}" for reason, things in report.missing.items())


def write_layers(rows: pandas.DataFrame, path: Path) -> None:
    """Write layers as a CSV file: first DeepBench's columns, with times in ms, then all other columns unchanged.

    rows: the result of ``layer_rows``.
    """
    first = [name for name in (RESULT_FOLDER, "layer", *DEEPBENCH) if name in rows]
    rows = rows[[*first, *rows.columns.difference(first, sort=False)]].rename(columns=DEEPBENCH)
    for name in (*OPERATIONS.values(), "total"):
        if f"{name}_s" in rows:
            rows[f"{name}_s"] *= 1e3
            rows = rows.rename(columns={f"{name}_s": f"{name}_ms"})
    write_frame(rows, path)


def write_frame(rows: pandas.DataFrame, path: Path) -> None:
    """Write a data frame as CSV, in seconds and bytes at full precision, without the individual time samples.

    See ``whole_file``.
    """
    with whole_text(path) as stream:
        rows.drop(columns=list(_INNER), errors="ignore").to_csv(stream, index=False)
