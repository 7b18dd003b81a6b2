"""The report of one result folder: the rows, tables and notes from which HTML pages, text and pictures are made."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas

from mucudnn.bench.contests.variants import TORCH
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.pages.measured import has_problems, layer_rows, measured, summary_rows, unmatched_published
from mucudnn.bench.pages.tables import TextTable, layer_table, problem_table, summary_table
from mucudnn.bench.sources.published import SOURCE, TABLES
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.results import BUSY
from mucudnn.words.units import format_bytes

_SIZES = {"workspace_limit", "workspace_budget", "cache_budget"}  # settings in bytes
# Labels that differ from the setting's name in the file.
_NAMES = {"time_limit": "most measuring for each problem"}
# Text for a null value, if it is not "none".
_NONE = {"algorithms": "all", "max_relative_error": "by data type"}


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A tuned operation of a layer: its rows in the results, its measured candidates, and its desirable set."""

    name: str
    batch_size: int
    rows: pandas.DataFrame
    measured: pandas.DataFrame
    desirable: pandas.DataFrame

    @property
    def allowed(self) -> pandas.DataFrame:
        """The candidates whose numerical error is within the bound."""
        return self.measured[self.measured["is_allowed"].astype(bool)]

    @property
    def undivided(self) -> pandas.DataFrame:
        """The allowed candidates that compute the whole mini-batch in one call."""
        return self.allowed[self.allowed["micro_batch_size"] == self.batch_size]


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
        candidates, desirable = self.folder.candidates.measured, self.folder.candidates.desirable
        keys = self._keys(self.rows)
        rows = dict(tuple(self.rows.groupby(keys, sort=False)))
        torch_s = self.rows["time_s"].where(self.rows["contestant"] == TORCH).groupby(keys).max().fillna(0.0)
        points = dict(tuple(desirable.groupby("subject", sort=False)))
        found = []
        names = self._keys(candidates.drop_duplicates("subject"))
        for key, (number, frame) in zip(names, candidates.groupby("subject", sort=False), strict=True):
            size = frame["batch_size"].iloc[0] if "batch_size" in frame else frame["micro_batch_size"].max()
            name = name_of(frame.iloc[0].to_dict())
            of_subject, of_set = rows.get(key, self.rows.iloc[:0]), points.get(number, desirable.iloc[:0])
            found.append((float(torch_s.get(key, 0.0)), Subject(name, int(size), of_subject, frame, of_set)))
        return [subject for _, subject in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def _keys(self, frame: pandas.DataFrame) -> pandas.Series[str]:
        """Return a text for each row that identifies its subject, such as an operation of a layer."""
        columns = [frame[name].tolist() for name in self.folder.header.subject_columns]
        return pandas.Series(["\n".join(map(str, of)) for of in zip(*columns, strict=True)], frame.index, dtype=object)

    def of_layers(self, names: Sequence[str]) -> Report:
        """Return a report that is restricted to these layers. Raises ``InvalidInputError`` for an unknown layer."""
        known = list(dict.fromkeys(self.rows["layer"])) if "layer" in self.rows else []
        if unknown := [name for name in names if name not in known]:
            raise InvalidInputError(
                f"{self.folder.path} has no layer {unknown[0]!r}; it has {', '.join(known) or 'no layers'}"
            )
        candidates = self.folder.candidates
        rows, of_layers, desirable = (
            frame[frame["layer"].isin(list(names))] for frame in (self.rows, candidates.measured, candidates.desirable)
        )
        candidates = replace(candidates, measured=of_layers, desirable=desirable)
        return Report(replace(self.folder, candidates=candidates), rows)


def report_of(folder: ResultFolder) -> Report:
    """Compute the report of a result folder."""
    return Report(folder, measured(folder))


def name_of(row: Mapping[Hashable, Any]) -> str:
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
