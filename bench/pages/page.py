"""The page: everything that a report of a result folder shows, and its HTML, one file that needs no other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.pages.layer_rows import layer_rows, summary_rows
from mucudnn.bench.pages.material import Material
from mucudnn.bench.pages.measured import has_problems, measured, not_numbers, unmatched_published
from mucudnn.bench.pages.tables import TextTable, layer_table, problem_table, summary_table
from mucudnn.bench.sources.published import SOURCE, TABLES
from mucudnn.words.errors import UnavailableError
from mucudnn.words.results import BUSY
from mucudnn.words.units import format_bytes

if TYPE_CHECKING:
    from mucudnn.bench.pages.pictures.drawn import Picture

_SIZES = {"workspace_limit", "workspace_budget", "cache_budget"}  # settings in bytes
# Settings that are called otherwise than in the file: commands call this limit --tuning-time or --time-limit.
_NAMES = {"time_limit": "most measuring for each problem"}
# What it means where a setting has no value; of others: none.
_NONE = {"algorithms": "all", "max_relative_error": "by data type"}
_TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True, eq=False)
class Report:
    """A result folder with all that is shown of it.

    facts, settings: name and text of what all rows have in common, and of the choices of the run. missing: what is not
    shown, each a reason and the things. rows, layers: as ``measured`` and ``layer_rows`` returned them. material: what
    pictures are drawn of.
    """

    folder: ResultFolder
    rows: pandas.DataFrame
    material: Material
    layers: pandas.DataFrame
    facts: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...]
    missing: tuple[tuple[str, tuple[str, ...]], ...]
    tables: tuple[TextTable, ...]

    @property
    def title(self) -> str:
        return f"{self.folder.header.benchmark}: {self.folder.header.source}"


def report_of(folder: ResultFolder) -> Report:
    """Compute all that is shown of a folder."""
    rows = measured(folder)
    layers = layer_rows(rows)
    tables = (
        summary_table(summary_rows(rows)),
        layer_table(layers),
        problem_table(rows, folder.header.subject_columns),
    )
    shown = tuple(table for table in tables if table.rows)
    return Report(
        folder,
        rows,
        Material.of(folder, rows),
        layers,
        _facts(folder),
        _settings(folder),
        _missing(folder, rows),
        shown,
    )


def _facts(folder: ResultFolder) -> tuple[tuple[str, str], ...]:
    header = folder.header
    limits = "; ".join(f"{dtype}: {limit}" for dtype, limit in header.limits.items() if limit.are_known)
    return (
        ("benchmark", header.benchmark),
        ("source", header.source),
        ("environment", str(header.environment)),
        ("machine's limits", limits or "not measured"),
        ("mucudnn", header.mucudnn),
        ("begun", header.date.isoformat(sep=" ")),
        ("folder", str(folder.path)),
    )


def _settings(folder: ResultFolder) -> tuple[tuple[str, str], ...]:
    every = folder.header.settings.items()
    return tuple(
        (_named(name), _NONE.get(name, "none") if value is None else _setting(value, is_size=name in _SIZES))
        for name, value in every
    )


def _named(setting: str) -> str:
    return _NAMES.get(setting, setting.replace("_", " "))


def _setting(value: object, *, is_size: bool) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_setting(each, is_size=is_size) for each in value)
    if value is None:
        return "none"
    return format_bytes(value) if is_size and isinstance(value, int) else str(value)


def _missing(folder: ResultFolder, rows: pandas.DataFrame) -> tuple[tuple[str, tuple[str, ...]], ...]:
    by_reason: dict[str, list[str]] = {}
    for one in folder.left_out:
        by_reason.setdefault(f"not measured: {one.reason}", []).append(one.what)
    for problem in folder.problems:
        by_reason.setdefault("not read, or not as it should be", []).append(problem)
    for reason, text in _unknown(folder, rows):
        by_reason.setdefault(reason, []).append(text)
    return tuple((reason, tuple(things)) for reason, things in by_reason.items())


def _unknown(folder: ResultFolder, rows: pandas.DataFrame) -> list[tuple[str, str]]:
    found = []
    if not len(rows):
        found.append(("no rows", f"{folder.path} has no row that can be shown"))
    for name, count in not_numbers(folder.rows).items():
        found.append(("not shown", f"{name} is no number in {count} rows"))
    if folder.header.is_timed and (failed := int((rows["time_s"].isna()).sum())):
        found.append(("no time", f"{failed} rows have no samples; the last column of the operations says why"))
    if busy := int((rows["load"] > BUSY).sum()):
        text = f"{busy} rows were measured while others took more than {BUSY:.0%} of the machine"
        found.append(("busy machine", text))
    if has_problems(rows):
        unmatched, every = unmatched_published(rows)
        if unmatched and folder.header.source in TABLES:
            text = f"{unmatched} of the {every} layers in {SOURCE}, are not in this folder with the same mini-batch"
            found.append(("published times", text))
        if rows["bound_s"].isna().any():
            found.append(("time / bound", "the machine's limits were not measured for all data types"))
    return found


def html_of(report: Report, pictures: Sequence[Picture] = (), without_pictures: str = "") -> str:
    """Return the page. without_pictures: why there are none.

    Raises ``UnavailableError`` where jinja2 is not installed.
    """
    return rendered(
        "page.html",
        report=report,
        pictures=pictures,
        without_pictures=without_pictures,
    )


def rendered(template: str, **values: Any) -> str:
    """Return a page made of a template. Raises ``UnavailableError`` where jinja2 is not installed."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise UnavailableError("the page needs jinja2, which is not installed: pip install 'mucudnn[report]'") from None
    loader = FileSystemLoader(_TEMPLATES)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return jinja.get_template(template).render(**values)
