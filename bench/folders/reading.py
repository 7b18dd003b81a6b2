"""Reads a result folder into pandas: what can be read is there, and what was left out is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from mucudnn.bench.folders.candidates import Candidates, no_candidates, read_candidates
from mucudnn.bench.folders.header import SUMMARY_FILE, Header, read_header, read_object, require_version
from mucudnn.bench.folders.rows import COLUMNS, Line, read_rows
from mucudnn.bench.folders.writing import LeftOut
from mucudnn.words.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class ResultFolder:
    """A result folder as it was read.

    lines: the objects of ``rows.jsonl`` that count, as they are. rows: the same, a row for each, in the order of the
    file, with all its columns (docs/result-folders.md), ``samples_s`` being a list, and ``time_s``, the median of the
    samples in seconds, NaN where there are none. candidates: what was measured to choose from. left_out: what the run
    did not measure. problems: what could not be read, with file and line.
    """

    path: Path
    header: Header
    lines: tuple[Line, ...]
    rows: pandas.DataFrame
    candidates: Candidates
    left_out: tuple[LeftOut, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def samples(self) -> pandas.DataFrame:
        """A row for each sample: ``row``, the index in ``rows``, ``round`` from 0, and ``time_s`` in seconds."""
        each = self.rows["samples_s"].map(len)
        return pandas.DataFrame(
            {
                "row": self.rows.index.repeat(each),
                "round": [number for samples in self.rows["samples_s"] for number in range(len(samples))],
                "time_s": [sample for samples in self.rows["samples_s"] for sample in samples],
            }
        )


def read_folder(path: Path) -> ResultFolder:
    """Read a result folder.

    Raises ``InvalidInputError`` where there is none, and where its environment file cannot be read.
    """
    header = read_header(path)
    found = read_rows(path, header)
    left_out, problems = _left_out(path)
    candidates = read_candidates(path, header)
    problems = (*found.problems, *candidates.problems, *problems)
    return folder_of_lines(path, header, found.lines, problems, left_out, candidates)


def folder_of_lines(
    path: Path,
    header: Header,
    lines: Sequence[Line],
    problems: tuple[str, ...] = (),
    left_out: tuple[LeftOut, ...] = (),
    candidates: Candidates | None = None,
) -> ResultFolder:
    """Return what was read: lines as ``rows.jsonl`` has them. candidates: None where the run kept none."""
    rows = pandas.DataFrame(list(lines) or {name: [] for name in (*COLUMNS, *header.subject_columns)})
    rows["time_s"] = [_median(samples) for samples in rows["samples_s"]]
    return ResultFolder(path, header, tuple(lines), rows, candidates or no_candidates(header), left_out, problems)


def _median(samples: list[float]) -> float:
    return float(pandas.Series(samples, dtype=float).median())


def _left_out(path: Path) -> tuple[tuple[LeftOut, ...], tuple[str, ...]]:
    """Return what the run left out, and what is wrong with the file that says so; there is none before it ends."""
    file = path / SUMMARY_FILE
    if not file.exists():
        return (), (f"{file} is not there: the run has not ended",)
    try:
        summary = read_object(file)
        require_version(file, summary)
        return tuple(_one_left_out(each) for each in summary["left_out"]), ()
    except (InvalidInputError, KeyError, TypeError) as error:
        return (), (f"{file} cannot be read, so that it is not known what was left out: {error}",)


def _one_left_out(record: Mapping[str, Any]) -> LeftOut:
    return LeftOut(str(record["what"]), str(record["reason"]))
