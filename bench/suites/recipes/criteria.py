"""Acceptance criteria of recipes, and how they are judged on the rows of result folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import groupby
from math import isnan
from statistics import median
from typing import Any

from mucudnn.bench.results.reading import Line, ResultFolder
from mucudnn.bench.results.speedups import Estimate, mean_speedup
from mucudnn.bench.results.variants import TORCH
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import did_you_mean, format_bytes, parse_bytes, parse_seconds, real, shown

_BOUNDS = ("at-least", "at-most")
_SPEEDUP = "speedup"


@dataclass(frozen=True, slots=True)
class Criterion:
    """A bound, inclusive, on the rows of one contestant in every result folder.

    value: ``speedup``, the geometric mean of the speedups over the contestant ``over`` of all rows of one dtype, memory
    format, policy and limit; or a column, or two as in ``workspace_bytes / limit_bytes``, where every row counts.
    Further columns are ``time_s``, the median of the samples, and ``failures``, 1 for a row without samples. total:
    whether the sum of the rows counts. where: values of columns by which rows are selected. bound: as written. limit:
    as a number.
    """

    name: str
    bound: Any
    limit: float
    is_most: bool
    value: str = _SPEEDUP
    of: str = "mucudnn"
    over: str = TORCH
    total: bool = False
    where: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, value: Any) -> Criterion:
        """Return the criterion of a key of ``[acceptable]``. Raises ``InvalidInputError`` if it is invalid."""
        own = [one.name for one in fields(cls)][4:]
        if not isinstance(value, dict) or sum(key in _BOUNDS for key in value) != 1:
            raise InvalidInputError(f"[acceptable] {name} is {shown(value)}; write {{ at-least = ... }} or at-most")
        if unknown := [key for key in value if key not in (*own, *_BOUNDS)]:
            raise InvalidInputError(
                f"[acceptable] {name} has {unknown[0]}; {did_you_mean(unknown[0], own)}allowed: {', '.join(own)}"
            )
        is_most = "at-most" in value
        bound = value.pop("at-most" if is_most else "at-least")
        return cls(name, bound, _number(bound, f"[acceptable] {name}"), is_most, **value)

    def __str__(self) -> str:
        over = f" over {self.over}" if self.value == _SPEEDUP else ""
        where = "".join(f", {column} {value}" for column, value in self.where.items())
        return f"{self.value} of {self.of}{over}{where} {'at most' if self.is_most else 'at least'} {self.bound}"

    def missed_by(self, found: Estimate) -> float:
        """Return by how much a value violates the bound, 0 or less if not. The better end of an interval counts."""
        better = found.low if self.is_most else found.high
        value = found.value if isnan(better) else better
        return value - self.limit if self.is_most else self.limit - value


@dataclass(frozen=True, slots=True)
class Verdict:
    """A criterion with the worst value, NaN if there was nothing to judge, and the place where it was found."""

    criterion: Criterion
    found: Estimate = field(default_factory=Estimate)
    place: str = "no measurement to judge this by"

    @property
    def passed(self) -> bool:
        return self.criterion.missed_by(self.found) <= 0

    @property
    def measured(self) -> str:
        """The value, with its interval, and the place."""
        if isnan(self.found.value):
            return self.place
        is_size = self.criterion.value.endswith("_bytes") and " / " not in self.criterion.value
        value = format_bytes(int(self.found.value)) if is_size else f"{self.found.value:.6g}"
        interval = "" if isnan(self.found.low) else f", {self.found.low:.6g} to {self.found.high:.6g}"
        return f"{value}{interval} ({self.place})"


def judge(criterion: Criterion, folders: Mapping[str, ResultFolder]) -> Verdict:
    """Return the worst verdict of a criterion over the rows that it selects in all folders."""
    found = (one for name, folder in folders.items() for one in _verdicts(criterion, name, folder))
    known = (one for one in found if not isnan(one.found.value))
    return max(known, key=lambda one: criterion.missed_by(one.found), default=Verdict(criterion))


def _verdicts(criterion: Criterion, name: str, folder: ResultFolder) -> Iterator[Verdict]:
    chosen = [line for line in folder.lines if line["contestant"] == criterion.of]
    chosen = [line for line in chosen if all(line.get(column) == value for column, value in criterion.where.items())]
    for choice, group in groupby(sorted(chosen, key=_choice), _choice):
        place, rows = ", ".join((name, *filter(None, choice))), [*group]
        if criterion.value == _SPEEDUP:
            pairs = [(_rival(line, criterion.over, folder), line["samples_s"]) for line in rows]
            found = [mean_speedup([(rival, ours) for rival, ours in pairs if rival and ours])]
        else:
            numbers = [number for line in rows if (number := _column(line, criterion.value)) is not None]
            found = [Estimate(one) for one in ([sum(numbers)] if criterion.total and numbers else numbers)]
        yield from (Verdict(criterion, one, place) for one in found)


def _choice(line: Line) -> tuple[str, ...]:
    """Return dtype, memory format, policy and limit of a row as texts, empty if it has none."""
    limit = line["limit_bytes"]
    names = (line.get("dtype"), line.get("memory_format"), line["policy"])
    return (*(name or "" for name in names), "" if limit is None else format_bytes(limit))


def _rival(line: Line, over: str, folder: ResultFolder) -> Sequence[float]:
    """Return the samples of the contestant ``over`` on the same subject, in the same rounds; empty if there are none.

    Of several rows, that with the same limit, or else with the same policy.
    """
    same = ("turns", *folder.header.subject_columns)
    rivals = [one for one in folder.lines if one["contestant"] == over and all(one[key] == line[key] for key in same)]
    for column in ("limit_bytes", "policy"):
        equal = [one for one in rivals if one[column] == line[column]]
        rivals = equal if equal and len(rivals) > 1 else rivals
    samples: Sequence[float] = rivals[0]["samples_s"] if len(rivals) == 1 else ()
    return samples


def _column(line: Line, name: str) -> float | None:
    first, _, second = name.partition(" / ")
    if second:
        parts = _column(line, first), _column(line, second)
        return None if parts[0] is None or not parts[1] else parts[0] / parts[1]
    if name == "failures":
        return float(not line["samples_s"])
    if name == "time_s":
        return median(line["samples_s"]) if line["samples_s"] else None
    found: float | None = line.get(name)
    return found


def _number(bound: Any, name: str) -> float:
    """Return a bound, a number or a text such as ``64MiB`` or ``10ms``, as a number."""
    if not isinstance(bound, str):
        return real(bound, name)
    for parse in (parse_bytes, parse_seconds):
        with suppress(InvalidInputError):
            if (parsed := parse(bound)) is not None:
                return float(parsed)
    raise InvalidInputError(f"{name} is {shown(bound)}; it must be a number, a size such as 64MiB, or a time")
