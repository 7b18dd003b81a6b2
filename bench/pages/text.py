"""A report as text: tables for the terminal, Markdown, and CSV for programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas
from rich.table import Table

from mucudnn.bench.pages.layer_rows import OPERATIONS
from mucudnn.bench.pages.page import Report
from mucudnn.bench.pages.several import RESULT_FOLDER, Reports
from mucudnn.bench.pages.tables import DEEPBENCH, TextTable
from mucudnn.bench.report.export import write_csv_of
from mucudnn.bench.report.tables import new_table

_MOST_SHOWN = 3
_INNER = [
    "format_version",
    "folder",
    "samples_s",
    "alone_samples_s",
    "error_map",
]  # columns that say nothing beside the folder


def printed_table(table: TextTable) -> Table:
    """Return a table for the terminal."""
    titles = [column.title for column in table.columns]
    are_text = next((index for index, column in enumerate(table.columns) if column.form), len(titles))
    printed = new_table(table.title, tuple(titles[:are_text]), titles[are_text:])
    for row in table.rows:
        printed.add_row(*row)
    return printed


def missing_in_words(report: Report) -> str:
    """Say what is not shown, and why; a line for each reason; empty: nothing was left out."""
    lines = []
    for reason, things in report.missing:
        more = f"; and {len(things) - _MOST_SHOWN} more" if len(things) > _MOST_SHOWN else ""
        lines.append(f"{reason}: {'; '.join(things[:_MOST_SHOWN])}{more}")
    return "\n".join(lines)


def markdown_of(report: Report) -> str:
    """Return the whole report as Markdown, without pictures."""
    return "\n".join(_markdown_lines(report))


def markdown_of_all(reports: Reports) -> str:
    """Return all reports as Markdown, one below the other, and why other folders are not shown."""
    if reports.only is not None:
        return markdown_of(reports.only)
    lines = [f"# {_plain(str(reports.path))}: {len(reports.by_name)} result folders", ""]
    lines += [f"- not shown: {_plain(message)}" for message in reports.unreadable]
    for name, report in reports.by_name.items():
        lines += ["", *_markdown_lines(report, "#", f"{name}: ")]
    return "\n".join(lines)


def _markdown_lines(report: Report, deeper: str = "", before: str = "") -> Iterator[str]:
    """deeper: added to the level of headings. before: begins the title."""
    yield f"{deeper}# {_plain(before + report.title)}\n"
    yield from (f"- {_plain(name)}: {_plain(text)}" for name, text in (*report.facts, *report.settings))
    yield f"\n{deeper}## What was left out\n"
    for reason, things in report.missing:
        yield from (f"- {_plain(reason)}: {_plain(thing)}" for thing in things)
    if not report.missing:
        yield "Nothing."
    for table in report.tables:
        yield f"\n{deeper}## {table.title}\n\n{table.caption}\n"
        yield _line([f"{column.group}: {column.title}" for column in table.columns])
        yield "|" + "|".join("--:" if column.form else "---" for column in table.columns) + "|"
        yield from (_line(row) for row in table.rows)


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(map(_plain, cells)) + " |"


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is, in one line."""
    text = " ".join(text.split())
    return "".join(f"\\{one}" if one in "\\`*_{}[]<>|#&$~" else one for one in text)


def write_layers(rows: pandas.DataFrame, path: Path) -> None:
    """Write what ``layer_rows`` returned as CSV, in DeepBench's columns, times in ms; all other columns as they are."""
    first = [name for name in (RESULT_FOLDER, "layer", *DEEPBENCH) if name in rows]
    rows = rows[[*first, *rows.columns.difference(first, sort=False)]].rename(columns=DEEPBENCH)
    for name in (*OPERATIONS.values(), "total"):
        if f"{name}_s" in rows:
            rows[f"{name}_s"] *= 1e3
            rows = rows.rename(columns={f"{name}_s": f"{name}_ms"})
    write_frame(rows, path)


def write_frame(rows: pandas.DataFrame, path: Path) -> None:
    """Write a data frame as CSV: numbers with all digits, seconds and bytes, and no samples. See ``whole_file``."""
    write_csv_of(path, rows.drop(columns=_INNER, errors="ignore"))
