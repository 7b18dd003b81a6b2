"""Material of pictures: rows as ``measured`` returned them, and what was measured to choose from."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.folders.reading import ResultFolder


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
        keys = self._keys(self.rows)
        rows = dict(tuple(self.rows.groupby(keys, sort=False)))
        torch_s = self.rows["time_s"].where(self.rows["contestant"] == TORCH).groupby(keys).max().fillna(0.0)
        desirable = dict(tuple(self.desirable.groupby("subject", sort=False)))
        candidates = dict(tuple(self.candidates.groupby("subject", sort=False)))
        found = []
        for number, key in zip(candidates, self._keys(self.candidates.drop_duplicates("subject")), strict=True):
            frame = candidates[number]
            of_subject = rows.get(key, self.rows.iloc[:0])
            points = desirable.get(number, self.desirable.iloc[:0])
            size = frame["batch_size"].iloc[0] if "batch_size" in frame else frame["micro_batch_size"].max()
            subject = Subject(name_of(frame.iloc[0].to_dict()), int(size), of_subject, frame, points)
            found.append((float(torch_s.get(key, 0.0)), subject))
        return [subject for _, subject in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def _keys(self, frame: pandas.DataFrame) -> pandas.Series[str]:
        """Return for each row the text that says what it is of."""
        columns = [frame[name].tolist() for name in self.subject_columns]
        return pandas.Series(["\n".join(map(str, of)) for of in zip(*columns, strict=True)], frame.index, dtype=object)


def name_of(row: Mapping[Hashable, Any]) -> str:
    """Name a subject: its layer and operation; of others than contiguous tensors also their format."""
    names = [str(row[name]) for name in ("layer", "operation") if name in row]
    return " ".join((*names, *_formats(row))) or str(row.get("subject", ""))


def _formats(row: Mapping[Hashable, Any]) -> tuple[str, ...]:
    return (str(row["memory_format"]),) if row.get("memory_format", "contiguous") != "contiguous" else ()
