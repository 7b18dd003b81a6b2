"""Judges the acceptance criteria of a recipe (an experiment in a TOML file) on the rows of its result folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isnan, nan
from typing import Any, NamedTuple, cast

import pandas

from mucudnn.bench.folders.reading import ResultFolder
from mucudnn.bench.folders.speedups import Estimate, speedup_of
from mucudnn.bench.pages.drawing import series_label
from mucudnn.bench.pages.measured import measured
from mucudnn.bench.recipes.criteria import MEASURES, Criterion

_EACH = ["folder", "contestant", "policy", "limit_bytes"]


class Group(NamedTuple):
    """The rows that a criterion judges together: those of one contestant, policy and limit in one folder.

    limit_bytes: the workspace limit; NaN without a limit.
    """

    folder: str
    contestant: str
    policy: str | None
    limit_bytes: float
    rows: pandas.DataFrame

    def __str__(self) -> str:
        return f"{self.folder}, {series_label(self.contestant, self.policy, self.limit_bytes)}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of applying a criterion to results.

    found: the worst value, or None if there was nothing to judge; if it has an interval, the criterion fails only if
    the whole interval violates the bound. place: the group with this value.
    """

    criterion: Criterion
    found: Estimate | None
    place: str = ""

    @property
    def passed(self) -> bool:
        return self.found is not None and _missed_by(self.criterion, self.found) <= 0

    @property
    def value(self) -> float | None:
        return None if self.found is None else self.found.value

    def __str__(self) -> str:
        if self.found is None:
            return f"{self.criterion.place}: no measurement to judge this by"
        write, found = MEASURES[self.criterion.measure].write, self.found
        interval = f", {write(found.low)} to {write(found.high)}" if found.low < found.high else ""
        return f"{write(found.value)}{interval} ({self.place})"


def _missed_by(criterion: Criterion, found: Estimate) -> float:
    """Return by how much a value violates the criterion's bound; 0 or less if the criterion is met.

    If the value has an interval, its better end counts.
    """
    if criterion.at_least is not None:
        return criterion.at_least - (found.value if isnan(found.high) else found.high)
    return (found.value if isnan(found.low) else found.low) - (criterion.at_most or 0.0)


def all_rows(folders: Mapping[str, ResultFolder]) -> pandas.DataFrame:
    """Return the rows of all folders, with the columns that recipes judge.

    Columns in addition to those of ``measured``: ``folder``, the name of the row's folder; ``share_of_limit``, the
    workspace over the limit; ``failures``, 1 if a row has no samples, else 0.
    """
    records = [
        {**record, "folder": name} for name, folder in folders.items() for record in measured(folder).to_dict("records")
    ]
    rows = pandas.DataFrame(records, columns=None if records else [*_EACH, "time_s", "turns", "workspace_bytes"])
    rows["share_of_limit"] = rows["workspace_bytes"] / rows["limit_bytes"]
    rows["failures"] = rows["time_s"].isna().astype(float)
    return rows


def judge(criterion: Criterion, rows: pandas.DataFrame) -> Judgement:
    """Return the worst judgement of a criterion over all groups of rows. rows: the result of ``all_rows``."""
    every = [one for one in _judgements(criterion, rows) if one.found is not None and not isnan(one.found.value)]
    nothing = Judgement(criterion, None)
    return max(every, key=lambda one: _missed_by(criterion, one.found or Estimate()), default=nothing)


def _judgements(criterion: Criterion, rows: pandas.DataFrame) -> Iterator[Judgement]:
    """Yield a judgement for each group of rows (one contestant, policy, limit, folder) that a criterion selects."""
    measure, every = MEASURES[criterion.measure], rows
    for column, value in criterion.where.items():
        rows = _equal(rows, column, value)
    rows = rows[rows["contestant"] == criterion.of]
    for group in groups(rows):
        if not measure.column:
            found = speedup(group.rows, every[every["contestant"] == criterion.over])
            yield Judgement(criterion, found, str(group))
        elif measure.column in rows:
            values = group.rows[measure.column]
            worst = values.min() if criterion.at_most is None else values.max()
            yield Judgement(criterion, Estimate(float(values.sum() if measure.is_sum else worst)), str(group))


def groups(rows: pandas.DataFrame) -> Iterator[Group]:
    """Yield a group for each contestant, policy and limit in each folder, in the order of the rows."""
    for key, group in rows.groupby(_EACH, dropna=False, sort=False):
        folder, contestant, policy, limit = (None if pandas.isna(one) else one for one in cast("tuple[Any, ...]", key))
        yield Group(str(folder), str(contestant), policy, nan if limit is None else float(limit), group)


def speedup(rows: pandas.DataFrame, rivals: pandas.DataFrame) -> Estimate:
    """Return the rivals' total time over that of the rows, weighted by the layers' counts; NaN if no row has a rival.

    A rival is the row of the contestant to compare with, timed in the same rounds; of several, the one with the same
    limit, or else the same policy. A rival that failed, for example because nothing fits the limit, is ignored.
    """
    pairs = [(row, _rival(row, rivals)) for _, row in rows.iterrows() if row["samples_s"]]
    known = [(row, rival) for row, rival in pairs if rival is not None]
    return speedup_of([_weighted(rival) for _, rival in known], [_weighted(row) for row, _ in known])


def _weighted(row: pandas.Series[Any]) -> list[float]:
    return [row["count"] * sample for sample in row["samples_s"]]


def _rival(row: pandas.Series[Any], rivals: pandas.DataFrame) -> pandas.Series[Any] | None:
    rivals = rivals[(rivals["folder"] == row["folder"]) & (rivals["turns"] == row["turns"])]
    for column in ("limit_bytes", "policy"):
        same = _equal(rivals, column, row[column])
        if len(rivals) > 1 and len(same):
            rivals = same
    return rivals.iloc[0] if len(rivals) == 1 and rivals["time_s"].notna().all() else None


def _equal(rows: pandas.DataFrame, column: str, value: object) -> pandas.DataFrame:
    """Return the rows with this value in a column; a missing value selects the rows in which it is missing."""
    if column not in rows:
        return rows[:0]
    return rows[rows[column].isna() if pandas.isna(value) else rows[column] == value]  # type: ignore[call-overload]
