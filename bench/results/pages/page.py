"""Reports of all result folders in a path, as one HTML page, terminal output, CSV, or pictures."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas

import mucudnn
from mucudnn.bench.results.pages.measured import (
    OPERATIONS,
    gains,
    has_problems,
    layer_rows,
    measured,
    summary_rows,
)
from mucudnn.bench.results.pages.pictures import KINDS, drawn
from mucudnn.bench.results.pages.tables import DEEPBENCH, layer_table, problem_table, summary_table
from mucudnn.bench.results.reading import HEADER_FILE, ResultFolder, folders_below, read_folder
from mucudnn.core.config import SETTINGS
from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.files import explained, whole_file, whole_text
from mucudnn.core.records import BUSY
from mucudnn.core.tables import Table
from mucudnn.core.values import format_bytes, grouped

RESULT_FOLDER = "result_folder"  # the column that names the folder of a row
# Columns that are not written to CSV files.
_INNER = ("format_version", "folder", "samples_s", "torch_samples_s")
# Columns that readers can filter by.
_FILTERED = {"operation", "contestant", "policy", "limit_bytes", "kind", "memory_format"}
_SIZES = {"workspace_limit", "workspace_budget", "cache_budget"}  # settings in bytes
# Labels that differ from the setting's name in the file.
_NAMES = {"time_limit": "most measuring for each problem"}
# Texts for null values: the words of the settings.
_NONE: dict[str, str] = {
    name: setting.metadata["word"] for name, setting in SETTINGS.items() if setting.metadata["word"]
}


@dataclass(frozen=True, slots=True, eq=False)
class FolderReport:
    """A result folder with everything derived from it for display.

    rows: the result of ``measured``.
    layers: that of ``layer_rows``.
    tables: those that have rows.
    missing: the items that the report does not show, by reason.
    """

    folder: ResultFolder
    title: str
    rows: pandas.DataFrame
    layers: pandas.DataFrame
    tables: list[Table]
    missing: dict[str, list[str]]


def report_of(folder: ResultFolder) -> FolderReport:
    """Compute the report of a result folder."""
    header, rows = folder.header, measured(folder)
    layers = layer_rows(rows)
    tables = summary_table(summary_rows(rows)), layer_table(layers), problem_table(rows, header.subject_columns)
    return FolderReport(
        folder,
        title=f"{header.benchmark}: {header.source}",
        rows=rows,
        layers=layers,
        tables=[table for table in tables if table.rows],
        missing=grouped(missing_in(folder, rows)),
    )


def missing_in(folder: ResultFolder, rows: pandas.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield the items that the report does not show, as pairs of reason and item.

    rows: the result of ``measured``.
    """
    for reason, subjects in folder.left_out.items():
        yield from ((f"not measured: {reason}", subject) for subject in subjects)
    for problem in folder.problems:
        yield "not read, or not as it should be", problem
    if not len(rows):
        yield "no rows", f"{folder.path} has no row that can be shown"
    if folder.header.is_timed and (failed := int((rows["time_s"].isna()).sum())):
        yield "no time", f"{failed} rows have no samples; the last column of the table of operations has the reason"
    if busy := int((rows["load"] > BUSY).sum()):
        yield "busy machine", f"{busy} rows were measured while others took more than {BUSY:.0%} of the machine"
    if has_problems(rows):
        if rows["bound_s"].isna().any():
            yield "time / bound", "the machine's limits were not measured for all data types"
        divided = gains(rows)
        if len(divided) and (same := int(divided["is_same"].sum())):
            yield (
                "what dividing gains",
                f"nothing in {same} of {len(divided)} layers and limits: same configuration as the undivided",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Reports:
    """The reports of the result folders in a path, by folder name.

    unreadable: the errors of skipped folders.
    """

    path: Path
    by_name: dict[str, FolderReport]
    unreadable: Sequence[str] = ()

    @property
    def only(self) -> FolderReport | None:
        """The single report; None if the path has several result folders or one was skipped."""
        return next(iter(self.by_name.values())) if len(self.by_name) == 1 and not self.unreadable else None

    def joined(self, frame_of: Callable[[FolderReport], pandas.DataFrame]) -> pandas.DataFrame:
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
    by_name, unreadable = dict[str, FolderReport](), []
    for folder in folders:
        try:
            by_name[str(folder.relative_to(path))] = report_of(read_folder(folder))
        except InvalidInputError as error:
            unreadable.append(str(error))
    if not by_name:
        raise InvalidInputError("\n".join(unreadable))
    return Reports(path, by_name, unreadable)


def html_of(reports: Reports, *, with_pictures: bool = True) -> str:
    """Return one HTML page with all reports, each in a section of its own if there are several.

    Raises ``UnavailableError`` if jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise UnavailableError("the page needs jinja2, which is not installed: pip install jinja2") from None
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = []
    for name, report in reports.by_name.items():
        pictures, lack = [], ""
        try:
            for kind, picture in drawn(report.folder, report.rows) if with_pictures else ():
                pictures.append((*KINDS[kind], f"data:image/svg+xml;base64,{b64encode(picture).decode()}"))
        except UnavailableError as error:
            lack = str(error)
        tables = [(table.title.lower(), table, choices_in(table)) for table in report.tables]
        parts.append((name, report, facts_of(report.folder), settings_of(report.folder), tables, pictures, lack))
    return jinja.get_template("page.html").render(
        reports=reports, only=reports.only, parts=parts, version=mucudnn.__version__
    )


def facts_of(folder: ResultFolder) -> dict[str, str]:
    """Return the properties common to all rows, such as the environment and the date, by name."""
    header = folder.header
    limits = "; ".join(f"{dtype}: {limit}" for dtype, limit in header.limits.items() if limit.are_known)
    return {
        "benchmark": header.benchmark,
        "source": header.source,
        "environment": str(header.environment),
        "machine's limits": limits or "not measured",
        "mucudnn": header.mucudnn,
        "begun": header.date.isoformat(sep=" "),
        "folder": str(folder.path),
    }


def settings_of(folder: ResultFolder) -> dict[str, str]:
    """Return the settings of the benchmark run as text, by name."""

    def text(name: str, value: object) -> str:
        return format_bytes(value) if name in _SIZES and isinstance(value, int) else str(value)

    texts = {}
    for name, value in folder.header.settings.items():
        label = _NAMES.get(name, name.replace("_", " "))
        if isinstance(value, (list, tuple)):
            texts[label] = ", ".join("none" if element is None else text(name, element) for element in value)
        else:
            texts[label] = _NONE.get(name, "none") if value is None else text(name, value)
    return texts


def choices_in(table: Table) -> list[tuple[int, str, list[str]]]:
    """Return the columns of a table that readers can filter by, each with its index, title and values."""
    choices = []
    for index, column in enumerate(table.columns):
        values = list(dict.fromkeys(row[index] for row in table.rows if row[index]))
        if column.key in _FILTERED and len(values) > 1:
            choices.append((index, column.title, values))
    return choices


def write_pictures_of(reports: Reports, folder: Path) -> list[Path]:
    """Write the pictures of all reports as SVG files; return the files. Several reports have a folder each.

    Raises ``UnavailableError`` if matplotlib is not installed, and ``OutputError`` if a file cannot be written.
    """
    files = []
    for name, report in reports.by_name.items():
        place = folder if reports.only is report else folder / name
        with explained(place):
            place.mkdir(parents=True, exist_ok=True)
        for kind, picture in drawn(report.folder, report.rows):
            files.append(place / f"{kind}.svg")
            with whole_file(files[-1]) as stream:
                stream.write(picture)
    return files


def write_layers(rows: pandas.DataFrame, path: Path) -> None:
    """Write layers as a CSV file: first DeepBench's columns, with times in ms, then all other columns unchanged.

    rows: the result of ``layer_rows``.
    """
    first = [name for name in (RESULT_FOLDER, "layer", *DEEPBENCH) if name in rows]
    rows = rows[[*first, *rows.columns.difference(first, sort=False)]].rename(columns=DEEPBENCH)
    timed = [name for name in (*OPERATIONS.values(), "total") if f"{name}_s" in rows]
    rows = rows.assign(**{f"{name}_s": rows[f"{name}_s"] * 1e3 for name in timed})
    write_frame(rows.rename(columns={f"{name}_s": f"{name}_ms" for name in timed}), path)


def write_frame(rows: pandas.DataFrame, path: Path) -> None:
    """Write a data frame as CSV, in seconds and bytes at full precision, without the individual time samples."""
    with whole_text(path) as stream:
        rows.drop(columns=list(_INNER), errors="ignore").to_csv(stream, index=False)
