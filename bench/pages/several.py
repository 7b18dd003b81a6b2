"""Reports of several result folders together, such as those of a recipe: one page, one table for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas

import mucudnn
from mucudnn.bench.folders.header import HEADER_FILE, folders_below
from mucudnn.bench.folders.reading import read_folder, read_result_file
from mucudnn.bench.pages.page import Report, html_of, rendered, report_of
from mucudnn.bench.pages.pictures.drawn import Picture, pictures_or_reason
from mucudnn.words.errors import InvalidInputError

RESULT_FOLDER = "result_folder"  # column that says which folder a row is from


@dataclass(frozen=True, slots=True, eq=False)
class Reports:
    """Reports of what a path has, by the names of the folders below it. unreadable: why other folders are not shown."""

    path: Path
    by_name: dict[str, Report]
    unreadable: tuple[str, ...] = ()

    @property
    def only(self) -> Report | None:
        """The report, where there is one and nothing else to tell."""
        return next(iter(self.by_name.values())) if len(self.by_name) == 1 and not self.unreadable else None

    def joined(self, frame_of: Callable[[Report], pandas.DataFrame]) -> pandas.DataFrame:
        """Return a frame of each report, one below the other; of several with ``RESULT_FOLDER``."""
        if self.only is not None:
            return frame_of(self.only)
        frames = {name: frame_of(report).dropna(axis=1, how="all") for name, report in self.by_name.items()}
        named = [frame.assign(**{RESULT_FOLDER: name}) for name, frame in frames.items() if len(frame)]
        rows = pandas.concat(named, ignore_index=True) if named else pandas.DataFrame({RESULT_FOLDER: []})
        return rows[[RESULT_FOLDER, *rows.columns.drop(RESULT_FOLDER)]]


def reports_in(path: Path) -> Reports:
    """Read a result folder, a file of ``--json``, or all result folders inside of a folder; unreadable ones are told.

    Raises ``InvalidInputError`` where there is nothing that can be read.
    """
    if path.is_file():
        return Reports(path, {path.name: report_of(read_result_file(path))})
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


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A section of the page. identity: begins its names there."""

    identity: str
    name: str
    report: Report
    pictures: Sequence[Picture]
    without_pictures: str


def html_of_all(reports: Reports) -> str:
    """Return one page of all, each folder a section. Raises ``UnavailableError`` where jinja2 is not installed."""
    if reports.only is not None:
        return html_of(reports.only, *pictures_or_reason(reports.only.material))
    return rendered(
        "folders.html",
        path=str(reports.path),
        parts=[
            _Part(f"folder-{number}", name, report, *pictures_or_reason(report.material))
            for number, (name, report) in enumerate(reports.by_name.items(), 1)
        ],
        unreadable=reports.unreadable,
        version=mucudnn.__version__,
    )
