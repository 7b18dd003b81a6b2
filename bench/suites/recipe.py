"""Reads recipes: TOML files with a command, the values of options that vary, and criteria for the results.

The three parts are those of Deep500 (Ben-Nun et al., 2019): fixed, mutable and acceptable.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import groupby, product
from math import isnan
from pathlib import Path
from statistics import median
from typing import Any

from mucudnn.bench.results.reading import Line, ResultFolder
from mucudnn.bench.results.speedups import Estimate, mean_speedup
from mucudnn.bench.results.variants import TORCH
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import did_you_mean, format_bytes, parse_bytes, parse_seconds, real, shown

_SUFFIX = ".toml"
_PARTS = ("fixed", "mutable", "acceptable")
_DEVICES = ("cpu", "cuda")
_KEYS = ("title", "takes", "published", *_PARTS, *_DEVICES)
_Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """An experiment as it applies to one type of device. command: without ``mucudnn``, such as ``bench training``.

    takes: roughly how long it takes on two CPU cores. published: published results. runs: the options and arguments of
    each run of the command, by the name of its result folder.
    """

    title: str
    takes: str
    published: tuple[str, ...]
    command: str
    runs: Mapping[str, Mapping[str, Any]]
    criteria: tuple[Criterion, ...]


def shipped_recipes() -> dict[str, Path]:
    """Return the TOML files of the recipes that come with mucudnn, by name."""
    return {path.stem: path for path in sorted(Path(__file__).with_name("recipes").glob(f"*{_SUFFIX}"))}


def find_recipe(name_or_file: str) -> Path:
    """Return the path of a recipe, given as a file that ends in .toml, or as the name of one of mucudnn's recipes.

    Raises ``InvalidInputError`` for an unknown name.
    """
    every = shipped_recipes()
    if name_or_file.endswith(_SUFFIX):
        return Path(name_or_file)
    if name_or_file not in every:
        raise InvalidInputError(
            f"recipe is {name_or_file!r}; {did_you_mean(name_or_file, every)}name a file that ends in {_SUFFIX}, or "
            f"one of {', '.join(every)}"
        )
    return every[name_or_file]


def read_recipe(path: Path, device: str = "cpu") -> Recipe:
    """Read a recipe for a type of device, whose own sections, such as ``[cpu.fixed]``, take precedence key by key.

    Raises ``InvalidInputError`` with the file, the section and the key.
    """
    try:
        top = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"{path} does not exist; name the file of a recipe") from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} is not a TOML file: {error}") from None
    try:
        _require_known("", top, _KEYS)
        for one in _DEVICES:
            _require_known(f"[{one}] ", _section(top, one), _PARTS)
        fixed, mutable, acceptable = (
            {**_section(top, part), **_section(_section(top, device), part)} for part in _PARTS
        )
        command = fixed.pop("command", None)
        if not isinstance(command, str):
            raise InvalidInputError('[fixed] needs a command, such as command = "bench convolutions"')
        criteria = tuple(Criterion.read(name, value) for name, value in acceptable.items())
        if not criteria:
            raise InvalidInputError("[acceptable] has no criterion")
        published = tuple(map(str, top.get("published", ())))
        title, takes = str(top.get("title", path.stem)), str(top.get("takes", ""))
        return Recipe(title, takes, published, command, _runs(fixed, mutable), criteria)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def _section(outer: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = outer.get(name, {})
    if not isinstance(found, dict):
        raise InvalidInputError(f"{name} is {shown(found)}; it must be a section, [{name}]")
    return found


def _require_known(section: str, found: Iterable[str], allowed: tuple[str, ...]) -> None:
    for key in found:
        if key not in allowed:
            hint = f"{did_you_mean(key, allowed)}allowed: {', '.join(allowed)}"
            raise InvalidInputError(f"{section}{key} is not known; {hint}")


def _runs(fixed: _Options, mutable: _Options) -> dict[str, _Options]:
    """Return the options of each run: one for each combination of the values that [mutable] lists.

    A text with commas is one value, for options that take several: the command then measures them in turns.
    """
    for key, value in fixed.items():
        if isinstance(value, (list, dict)) or key in mutable:
            raise InvalidInputError(f"[fixed] {key} is {shown(value)}; it must be one value, and not in [mutable], too")
    axes = {key: value if isinstance(value, list) else [value] for key, value in mutable.items()}
    several = [key for key, values in axes.items() if len(values) > 1]
    runs = {}
    for chosen in product(*axes.values()):
        options = {**fixed, **dict(zip(axes, chosen, strict=True))}
        name = "-".join(re.sub(r"[^\w.]+", "-", str(options[key])).strip("-.") for key in several)
        runs[name or "results"] = options
    return runs


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
