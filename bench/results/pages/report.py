"""The report of one result folder: the rows, tables and notes from which HTML pages, text and pictures are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import pandas

from mucudnn.bench.results.pages.measured import (
    gains,
    has_problems,
    layer_rows,
    measured,
    summary_rows,
    unmatched_published,
)
from mucudnn.bench.results.pages.tables import TextTable, layer_table, problem_table, summary_table
from mucudnn.bench.results.reading import ResultFolder, subject_key
from mucudnn.bench.results.variants import TORCH
from mucudnn.bench.sources.published import SOURCE, TABLES
from mucudnn.core.records import BUSY
from mucudnn.core.values import format_bytes

_SIZES = {"workspace_limit", "workspace_budget", "cache_budget"}  # settings in bytes
# Labels that differ from the setting's name in the file.
_NAMES = {"time_limit": "most measuring for each problem"}
# Text for a null value, if it is not "none".
_NONE = {"algorithms": "all", "max_relative_error": "by data type"}


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A tuned operation of a layer: the candidates whose error is within the bound, and its desirable set."""

    name: str
    batch_size: int
    allowed: pandas.DataFrame
    desirable: pandas.DataFrame


@dataclass(frozen=True, eq=False)
class Report:
    """A result folder with everything derived from it for display. rows: the result of ``measured``."""

    folder: ResultFolder
    rows: pandas.DataFrame

    @property
    def title(self) -> str:
        return f"{self.folder.header.benchmark}: {self.folder.header.source}"

    @cached_property
    def layers(self) -> pandas.DataFrame:
        """The rows joined by layer, as returned by ``layer_rows``."""
        return layer_rows(self.rows)

    @cached_property
    def tables(self) -> list[TextTable]:
        """The tables of this report that have rows."""
        every = (
            summary_table(summary_rows(self.rows)),
            layer_table(self.layers),
            problem_table(self.rows, self.folder.header.subject_columns),
        )
        return [table for table in every if table.rows]

    @property
    def facts(self) -> dict[str, str]:
        """The properties common to all rows, such as the environment and the date, by name."""
        header = self.folder.header
        limits = "; ".join(f"{dtype}: {limit}" for dtype, limit in header.limits.items() if limit.are_known)
        return {
            "benchmark": header.benchmark,
            "source": header.source,
            "environment": str(header.environment),
            "machine's limits": limits or "not measured",
            "mucudnn": header.mucudnn,
            "begun": header.date.isoformat(sep=" "),
            "folder": str(self.folder.path),
        }

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the benchmark run as text, by name."""
        return {
            _NAMES.get(name, name.replace("_", " ")): _NONE.get(name, "none")
            if value is None
            else _setting(value, is_size=name in _SIZES)
            for name, value in self.folder.header.settings.items()
        }

    @cached_property
    def missing(self) -> dict[str, list[str]]:
        """The items that the report does not show, grouped by the reason."""
        found: dict[str, list[str]] = {}
        for reason, text in _missing(self.folder, self.rows):
            found.setdefault(reason, []).append(text)
        return found

    @cached_property
    def subjects(self) -> list[Subject]:
        """The tuned subjects that have candidates, sorted by torch's time, longest first."""
        header = self.folder.header
        torchs = (line for line in self.folder.lines if line["contestant"] == TORCH and line["samples_s"])
        torch_s = {subject_key(line, header): median(line["samples_s"]) for line in torchs}
        lines = [line for line in self.folder.candidates if any(one["is_allowed"] for one in line["candidates"])]
        lines.sort(key=lambda line: torch_s.get(subject_key(line, header), 0.0), reverse=True)
        return [
            Subject(
                _name_of(line),
                int(line.get("batch_size") or max(one["micro_batch_size"] for one in line["candidates"])),
                pandas.DataFrame([one for one in line["candidates"] if one["is_allowed"]]),
                pandas.DataFrame(line["desirable"]),
            )
            for line in lines
        ]


def report_of(folder: ResultFolder) -> Report:
    """Compute the report of a result folder."""
    return Report(folder, measured(folder))


def _name_of(row: Mapping[str, Any]) -> str:
    """Return a row's name: its layer, its operation, and its memory format unless that is contiguous."""
    names = [str(row[name]) for name in ("layer", "operation") if name in row]
    if row.get("memory_format", "contiguous") != "contiguous":
        names.append(str(row["memory_format"]))
    return " ".join(names) or str(row.get("subject", ""))


def _setting(value: object, *, is_size: bool) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_setting(each, is_size=is_size) for each in value)
    if value is None:
        return "none"
    return format_bytes(value) if is_size and isinstance(value, int) else str(value)


def _missing(folder: ResultFolder, rows: pandas.DataFrame) -> Iterator[tuple[str, str]]:
    """Yield the items that the report does not show, as pairs of reason and item."""
    for one in folder.left_out:
        yield f"not measured: {one.reason}", one.what
    for problem in folder.problems:
        yield "not read, or not as it should be", problem
    if not len(rows):
        yield "no rows", f"{folder.path} has no row that can be shown"
    if folder.header.is_timed and (failed := int((rows["time_s"].isna()).sum())):
        yield "no time", f"{failed} rows have no samples; the last column of the table of operations has the reason"
    if busy := int((rows["load"] > BUSY).sum()):
        yield "busy machine", f"{busy} rows were measured while others took more than {BUSY:.0%} of the machine"
    if has_problems(rows):
        unmatched, every = unmatched_published(rows)
        if unmatched and folder.header.source in TABLES:
            text = f"{unmatched} of the {every} layers in {SOURCE}, are not in this folder with the same mini-batch"
            yield "published times", text
        if rows["bound_s"].isna().any():
            yield "time / bound", "the machine's limits were not measured for all data types"
        of_layers = gains(rows)
        if len(of_layers) and (same := int(of_layers["is_same"].sum())):
            text = f"nothing in {same} of {len(of_layers)} layers and limits: same configuration as the undivided"
            yield "what dividing gains", text
