"""Reports of several result folders together, such as those of a recipe: one page, one table for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas

import mucudnn
from mucudnn.bench.folders.header import HEADER_FILE, folders_below
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.folders.result_files import read_result_file
from mucudnn.bench.pages.layer_pictures import layer_pictures
from mucudnn.bench.pages.page import Report, html_of, rendered, report_of
from mucudnn.bench.pages.pictures.drawn import Picture, pictures_or_reason
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.units import format_bytes

MOST_BYTES = 5 * 2**20  # of a page: more takes a browser long
RESULT_FOLDER = "result_folder"  # column that says which folder a row is from
_NO_LAYERS: dict[str, Any] = {"layers": []}


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
    layer_pictures: dict[str, Any] = field(default_factory=dict)

    @property
    def drawn_bytes(self) -> int:
        return sum(len(one.svg.encode()) for one in self.pictures) + len(json.dumps(self.layer_pictures))


def html_of_all(reports: Reports, most_bytes: int = MOST_BYTES) -> str:
    """Return one page of all, each folder a section.

    Where it would be larger than ``most_bytes``, the folders with the largest pictures have none, which is said.
    Raises ``UnavailableError`` where jinja2 is not installed.
    """
    if reports.only is not None:
        return html_of(reports.only, *pictures_or_reason(reports.only.material))
    every = [
        _part(f"folder-{number}", name, report) for number, (name, report) in enumerate(reports.by_name.items(), 1)
    ]
    page = _rendered(reports, every)
    excess = len(page.encode()) - most_bytes
    if excess <= 0:
        return page
    undrawn: set[str] = set()
    for part in sorted(every, key=lambda part: -part.drawn_bytes):
        if excess > 0:
            undrawn.add(part.identity)
            excess -= part.drawn_bytes
    return _rendered(reports, [_undrawn(part, most_bytes) if part.identity in undrawn else part for part in every])


def _part(identity: str, name: str, report: Report) -> _Part:
    drawn, reason = pictures_or_reason(report.material, f"{identity}-")
    return _Part(identity, name, report, drawn, reason, layer_pictures(report.material))


def _undrawn(part: _Part, most_bytes: int) -> _Part:
    reason = (
        f"this page would be larger than {format_bytes(most_bytes)}; mucudnn report {part.report.folder.path} "
        "--html FILE.html has them"
    )
    return replace(part, pictures=(), without_pictures=reason, layer_pictures=_NO_LAYERS)


def _rendered(reports: Reports, parts: Sequence[_Part]) -> str:
    return rendered(
        "folders.html",
        path=str(reports.path),
        parts=parts,
        unreadable=reports.unreadable,
        version=mucudnn.__version__,
    )
