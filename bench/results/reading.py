"""Reads result folders into pandas, and reports unreadable parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from mucudnn.bench.results.candidates import CANDIDATES_FILE, read_candidates
from mucudnn.bench.results.header import (
    ROWS_FILE,
    SUMMARY_FILE,
    Header,
    read_header,
    read_object,
    require_version,
)
from mucudnn.bench.results.rows import COLUMNS, Line, read_rows
from mucudnn.core.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A subject that a benchmark did not measure, and the reason, both as text."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class ResultFolder:
    """The content of a result folder.

    lines: the valid objects of ``rows.jsonl``. rows: ``lines`` as a data frame, in the order of the file, with the
    columns described in docs/benchmarks.md and ``time_s``, the median of ``samples_s`` in seconds, NaN without samples.
    candidates: the valid objects of ``candidates.jsonl``. summary: the object of ``summary.json``; empty until the run
    ends. problems: messages about unreadable content, with file and line.
    """

    path: Path
    header: Header
    lines: tuple[Line, ...]
    rows: pandas.DataFrame
    candidates: tuple[Line, ...]
    summary: Mapping[str, Any]
    problems: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The subjects that the benchmark did not measure, with the reasons."""
        return tuple(LeftOut(one["what"], one["reason"]) for one in self.summary.get("left_out", ()))

    @property
    def left_out_by_reason(self) -> dict[str, list[str]]:
        """The names of the subjects that the benchmark did not measure, grouped by reason."""
        found: dict[str, list[str]] = {}
        for one in self.left_out:
            found.setdefault(one.reason, []).append(one.what)
        return found


def read_folder(path: Path) -> ResultFolder:
    """Read a result folder.

    Raises ``InvalidInputError`` if ``path`` is not a result folder, or if its environment file cannot be read.
    """
    header = read_header(path)
    file = path / SUMMARY_FILE
    problems: tuple[str, ...] = ()
    try:
        summary = _checked_summary(file, read_object(file))
    except InvalidInputError as error:
        told = f"{file} cannot be read, so it is unknown what was left out: {error}"
        summary, problems = {}, (told if file.exists() else f"{file} does not exist: the run has not ended",)
    found, (candidates, undone) = read_rows(path / ROWS_FILE, header), read_candidates(path / CANDIDATES_FILE, header)
    rows = pandas.DataFrame(list(found.lines) or {name: [] for name in (*COLUMNS, *header.subject_columns)})
    rows["time_s"] = [float(pandas.Series(samples, dtype=float).median()) for samples in rows["samples_s"]]
    problems = (*found.problems, *undone, *problems)
    return ResultFolder(path, header, found.lines, rows, tuple(candidates), summary, problems)


def _checked_summary(file: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """Validate the object of ``summary.json`` and return it.

    Raises ``InvalidInputError`` if its list of unmeasured subjects is invalid.
    """
    require_version(file, summary)
    try:
        summary["left_out"] = [{key: str(one[key]) for key in ("what", "reason")} for one in summary["left_out"]]
    except (KeyError, TypeError) as error:
        raise InvalidInputError(f"{file}: left_out is invalid: {error}") from None
    return summary
