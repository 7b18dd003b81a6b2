"""Material of pictures: rows as ``measured`` returned them, and what was measured to choose from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas

from mucudnn.bench.contests.torch_variants import TORCH
from mucudnn.bench.folders.reading import ResultFolder

_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """One subject that was tuned: its rows, its candidates and its desirable set, as ``Candidates`` has them."""

    name: str
    batch_size: int
    rows: pandas.DataFrame
    measured: pandas.DataFrame
    desirable: pandas.DataFrame

    @property
    def allowed(self) -> pandas.DataFrame:
        """Candidates that are not barred by their error."""
        return self.measured[self.measured["is_allowed"].astype(bool)]

    @property
    def undivided(self) -> pandas.DataFrame:
        """Allowed candidates that compute the whole mini-batch at once."""
        return self.allowed[self.allowed["micro_batch_size"] == self.batch_size]


@dataclass(frozen=True, eq=False)
class Material:
    """A folder as pictures need it.

    rows: as ``measured`` returned them. candidates, desirable: frames of ``Candidates``. settings: of the run.
    subject_columns: those that say what a row is of.
    """

    rows: pandas.DataFrame
    candidates: pandas.DataFrame
    desirable: pandas.DataFrame
    settings: Mapping[str, Any]
    subject_columns: tuple[str, ...]

    @classmethod
    def of(cls, folder: ResultFolder, rows: pandas.DataFrame) -> Material:
        """rows: what ``measured`` returned of the folder."""
        found, header = folder.candidates, folder.header
        return cls(rows, found.measured, found.desirable, header.settings, header.subject_columns)

    def of_layers(self, names: Collection[str]) -> Material:
        """Keep these layers alone."""
        rows, candidates, desirable = (
            frame[frame["layer"].isin(list(names))] for frame in (self.rows, self.candidates, self.desirable)
        )
        return replace(self, rows=rows, candidates=candidates, desirable=desirable)

    @cached_property
    def subjects(self) -> list[Subject]:
        """Return what was tuned and has candidates, what takes torch longest first."""
        rows = dict(self._by_key(self.rows))
        desirable = dict(tuple(self.desirable.groupby("subject", sort=False)))
        found = []
        for number, frame in self.candidates.groupby("subject", sort=False):
            key = self._key(frame)
            of_subject = rows.get(key, self.rows.iloc[:0])
            points = desirable.get(number, self.desirable.iloc[:0])
            size = frame["batch_size"].iloc[0] if "batch_size" in frame else frame["micro_batch_size"].max()
            found.append(Subject(name_of(frame.iloc[0]), int(size), of_subject, frame, points))
        return sorted(found, key=_torch_s, reverse=True)

    def _by_key(self, frame: pandas.DataFrame) -> Iterator[tuple[_Key, pandas.DataFrame]]:
        for _, group in frame.groupby(list(self.subject_columns), dropna=False, sort=False):
            yield self._key(group), group

    def _key(self, frame: pandas.DataFrame) -> _Key:
        return tuple(str(frame[name].iloc[0]) for name in self.subject_columns)


def name_of(row: pandas.Series[Any]) -> str:
    """Name a subject: its layer and operation; of others than contiguous tensors also their format."""
    names = [str(row[name]) for name in ("layer", "operation") if name in row]
    return " ".join((*names, *_formats(row))) or str(row.get("subject", ""))


def _formats(row: pandas.Series[Any]) -> tuple[str, ...]:
    return (str(row["memory_format"]),) if row.get("memory_format", "contiguous") != "contiguous" else ()


def _torch_s(subject: Subject) -> float:
    times = subject.rows[subject.rows["contestant"] == TORCH]["time_s"].dropna()
    return float(times.max()) if len(times) else 0.0
