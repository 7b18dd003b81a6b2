"""Puts two result folders side by side: rows that both have, compared; rows that only one of them has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.rows import Key, Line, row_key, subject_key
from mucudnn.bench.tracking.verdicts import Change, Pair, Samples, Verdict, changes
from mucudnn.words.errors import InvalidInputError

# What torch's own time depends on, beside the row: where it is equal, torch is what the others are measured by.
_OF_TORCH = ("device", "capability", "threads", "torch", "library", "numerics")


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A row that both folders have. before, after: as they were read."""

    before: Line
    after: Line
    change: Change
    is_controlled: bool


@dataclass(frozen=True, slots=True, eq=False)
class FolderComparison:
    """Two folders side by side.

    rows: in the order of the first folder. only_before, only_after: rows of one folder, or without samples in the
    other. tolerance: a fraction; changes up to it count as none.
    """

    before: ResultFolder
    after: ResultFolder
    rows: tuple[ComparedRow, ...]
    only_before: tuple[Line, ...]
    only_after: tuple[Line, ...]
    tolerance: float

    def of(self, verdict: Verdict) -> list[ComparedRow]:
        return [row for row in self.rows if row.change.verdict is verdict]

    @property
    def is_torch_the_same(self) -> bool:
        """Whether torch's own time can be what others are measured by."""
        return is_torch_the_same(self.before, self.after)


def compare_folders(before: ResultFolder, after: ResultFolder, tolerance: float) -> FolderComparison:
    """Compare two folders row by row. Torch's own rows are compared only where torch itself, or the machine, changed.

    Raises ``InvalidInputError`` for folders of different benchmarks, and ``UnavailableError`` where scipy is missing.
    """
    if before.header.subject_columns != after.header.subject_columns:
        raise InvalidInputError(
            f"{before.path} is of bench {before.header.benchmark}, {after.path} of bench {after.header.benchmark}: "
            "they have no rows in common; name two folders of the same benchmark"
        )
    same_torch = is_torch_the_same(before, after)
    mine, others = _Timed(before, same_torch), _Timed(after, same_torch)
    common = [key for key in mine.rows if key in others.rows]
    pairs = [_pair(mine, others, key) for key in common]
    rows = tuple(
        ComparedRow(mine.rows[key], others.rows[key], change, pair.is_controlled)
        for key, pair, change in zip(common, pairs, changes(pairs, tolerance), strict=True)
    )
    only_before = tuple(line for key, line in mine.rows.items() if key not in others.rows)
    only_after = tuple(line for key, line in others.rows.items() if key not in mine.rows)
    return FolderComparison(before, after, rows, only_before, only_after, tolerance)


def is_torch_the_same(before: ResultFolder, after: ResultFolder) -> bool:
    """Whether torch and the machine are those of the other folder."""
    mine, others = before.header.environment, after.header.environment
    return all(getattr(mine, name) == getattr(others, name) for name in _OF_TORCH)


class _Timed:
    """Rows of a folder that have samples, by their keys. torch_controls: torch's rows are what others are held against.

    Then they are no rows to be compared themselves.
    """

    def __init__(self, folder: ResultFolder, torch_controls: bool) -> None:
        header = folder.header
        every = {row_key(line, header): line for line in folder.lines if line["samples_s"]}
        torchs = {key: line for key, line in every.items() if torch_controls and line["contestant"] == TORCH}
        self.rows = {key: line for key, line in every.items() if key not in torchs}
        self._torchs = {subject_key(line, header): line for line in torchs.values()}
        self._header = header

    def samples(self, key: Key) -> Samples:
        """Return logarithms of a row's samples."""
        return _logarithms(self.rows[key])

    def over_torch(self, key: Key) -> Samples | None:
        """Return logarithms of a row's samples over torch's of the same rounds; None: torch did not run beside."""
        line = self.rows[key]
        torch = self._torchs.get(subject_key(line, self._header))
        if torch is None or torch["turns"] != line["turns"] or len(torch["samples_s"]) != len(line["samples_s"]):
            return None
        return np.subtract(self.samples(key), _logarithms(torch))


def _logarithms(line: Line) -> Samples:
    samples: Samples = np.asarray(line["samples_s"], dtype=np.float64)
    return np.log(samples)


def _pair(before: _Timed, after: _Timed, key: Key) -> Pair:
    mine, others = before.over_torch(key), after.over_torch(key)
    if mine is None or others is None:
        return Pair(before.samples(key), after.samples(key), is_controlled=False)
    return Pair(mine, others, is_controlled=True)
