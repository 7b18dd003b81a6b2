"""Judges whether what a recipe demands came out, by the rows of its result folders alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple, cast

import pandas

from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.pages.drawing import series_label
from mucudnn.bench.pages.measured import measured
from mucudnn.bench.recipes.criteria import MEASURES, Criterion

_EACH = ["folder", "contestant", "policy", "limit_bytes"]


class Group(NamedTuple):
    """Rows that a criterion is judged for: it must hold for each group. limit_bytes: NaN where there is none."""

    folder: str
    contestant: str
    policy: str | None
    limit_bytes: float
    rows: pandas.DataFrame

    def __str__(self) -> str:
        return f"{self.folder}, {series_label(self.contestant, self.policy, self.limit_bytes)}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outcome of a criterion. value: the worst; ``None``: there was nothing to judge. place: where it was found."""

    criterion: Criterion
    value: float | None
    place: str = ""

    @property
    def passed(self) -> bool:
        if self.value is None:
            return False
        low, high = self.criterion.at_least, self.criterion.at_most
        return (low is None or self.value >= low) and (high is None or self.value <= high)

    @property
    def found(self) -> str:
        """What was found, in words."""
        if self.value is None:
            return "nothing was measured that this could be judged by"
        return f"{self.criterion.write(self.value)} ({self.place})" if self.place else self.criterion.write(self.value)


def all_rows(folders: Mapping[str, ResultFolder]) -> pandas.DataFrame:
    """Return the rows of all folders as reports have them, with what recipes judge besides.

    Columns beside those of ``measured``: ``folder``, its name; ``share_of_limit``, the workspace over the limit;
    ``failures``, 1 where a row has no samples, else 0.
    """
    records = [
        {**record, "folder": name} for name, folder in folders.items() for record in measured(folder).to_dict("records")
    ]
    rows = pandas.DataFrame(records, columns=None if records else [*_EACH, "time_s", "turns", "workspace_bytes"])
    rows["share_of_limit"] = rows["workspace_bytes"] / rows["limit_bytes"]
    rows["failures"] = rows["time_s"].isna().astype(float)
    return rows


def judge(criterion: Criterion, rows: pandas.DataFrame) -> Judgement:
    """Judge by the rows of all folders, as ``all_rows`` returns them: the worst of all that is judged counts."""
    values = [one for one in _values(criterion, rows) if not pandas.isna(one[0])]
    if not values:
        return Judgement(criterion, None)
    worst = (max if criterion.at_least is None else min)(values, key=lambda one: one[0])
    return Judgement(criterion, *worst)


def _values(criterion: Criterion, rows: pandas.DataFrame) -> Iterator[tuple[float, str]]:
    """Yield a value for each that the criterion is judged for, and what that is, in words."""
    measure, every = MEASURES[criterion.measure], rows
    for column, value in criterion.where.items():
        rows = _equal(rows, column, value)
    rows = rows[rows["contestant"] == criterion.of]
    for group in groups(rows):
        if not measure.column:
            yield speedup(group.rows, every[every["contestant"] == criterion.over]), str(group)
        elif measure.column in rows:
            found = group.rows[measure.column]
            worst = found.min() if criterion.at_most is None else found.max()
            yield float(found.sum() if measure.is_sum else worst), str(group)


def groups(rows: pandas.DataFrame) -> Iterator[Group]:
    """Yield the rows of each contestant under each policy and limit in each folder, in their order."""
    for key, group in rows.groupby(_EACH, dropna=False, sort=False):
        folder, contestant, policy, limit = (None if pandas.isna(one) else one for one in cast("tuple[Any, ...]", key))
        yield Group(str(folder), str(contestant), policy, nan if limit is None else float(limit), group)


def speedup(rows: pandas.DataFrame, rivals: pandas.DataFrame) -> float:
    """Return the rivals' time over that of the rows, each as often as its layer occurs; NaN: none has a rival.

    A row's rival was timed in the same turns; of several, it is the one of the same limit, or else of the same policy.
    """
    pairs = [(row["count"] * _rival_s(row, rivals), row["count"] * row["time_s"]) for _, row in rows.iterrows()]
    known = [(theirs, ours) for theirs, ours in pairs if theirs == theirs and ours == ours]
    return sum(theirs for theirs, _ in known) / sum(ours for _, ours in known) if known else nan


def _rival_s(row: pandas.Series[Any], rivals: pandas.DataFrame) -> float:
    rivals = rivals[(rivals["folder"] == row["folder"]) & (rivals["turns"] == row["turns"])]
    for column in ("limit_bytes", "policy"):
        alike = _equal(rivals, column, row[column])
        if len(rivals) > 1 and len(alike):
            rivals = alike
    return float(rivals["time_s"].iloc[0]) if len(rivals) == 1 else nan


def _equal(rows: pandas.DataFrame, column: str, value: object) -> pandas.DataFrame:
    """Return the rows that have this value, a missing one being equal to another."""
    if column not in rows:
        return rows[:0]
    return rows[rows[column].isna() if pandas.isna(value) else rows[column] == value]  # type: ignore[call-overload]
