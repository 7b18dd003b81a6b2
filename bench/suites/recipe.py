"""Recipes: experiments as TOML files, in the three parts of Deep500 (Ben-Nun et al., 2019): fixed, mutable, acceptable.

Those that come with mucudnn are in the folder ``recipes``; docs/benchmarks.md describes the format.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, product
from math import inf, isnan
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from mucudnn.bench.results.reading import Line, ResultFolder, row_key
from mucudnn.bench.results.statistics import Estimate, mean_speedup
from mucudnn.bench.results.variants import TORCH
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import did_you_mean, format_bytes, grouped, parse_bytes, parse_seconds, real, shown

SHIPPED = {path.stem: path for path in sorted(Path(__file__).with_name("recipes").glob("*.toml"))}
_PARTS, _DEVICES = ("fixed", "mutable", "acceptable"), ("cpu", "cuda")
_OF_CRITERION, _BOUNDS = ("value", "of", "over", "total", "fastest", "where"), ("at-least", "at-most")
_SPEEDUP = "speedup"


@dataclass(frozen=True, slots=True)
class Criterion:
    """An inclusive bound on the rows of the contestant ``of``; other keys are as in the file.

    limit: the bound as a number.
    """

    name: str
    bound: Any
    limit: float
    is_most: bool
    value: str = _SPEEDUP
    of: str = "mucudnn"
    over: str = ""
    total: bool = False
    fastest: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rival(self) -> str:
        """The contestant to compare with, by default torch for a speedup; empty if there is none."""
        return self.over or (TORCH if self.value == _SPEEDUP else "")

    def __str__(self) -> str:
        over = f" over {self.rival}" if self.rival else ""
        where = "".join(f", {column} {value}" for column, value in self.where.items())
        fastest = f", fastest {self.fastest}" if self.fastest else ""
        bound = f"{'at most' if self.is_most else 'at least'} {self.bound}"
        return f"{self.value} of {self.of}{over}{where}{fastest} {bound}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """An experiment on one type of device.

    runs: options of each run of the command, by the name of its folder.
    """

    title: str
    takes: str
    published: tuple[str, ...]
    command: str
    runs: Mapping[str, Mapping[str, Any]]
    criteria: tuple[Criterion, ...]


def read_recipe(name_or_file: str | Path, device: str = "cpu") -> Recipe:
    """Read one of mucudnn's recipes or a file, for a type of device, whose own sections take precedence key by key.

    Raises ``InvalidInputError`` for an unknown name, and with the file, the section and the key that is wrong.
    """
    path = SHIPPED.get(str(name_or_file), Path(name_or_file))
    if path.suffix != ".toml":
        raise InvalidInputError(
            f"recipe is {str(path)!r}; {did_you_mean(str(path), SHIPPED)}name a file that ends in .toml, or one of "
            f"{', '.join(SHIPPED)}"
        )
    try:
        top = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(f"{path} does not exist; name the file of a recipe") from None
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{path} is not a TOML file: {error}") from None
    try:
        return _recipe(top, path.stem, device)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def _recipe(top: Mapping[str, Any], name: str, device: str) -> Recipe:
    _require_known("", top, ("title", "takes", "published", *_PARTS, *_DEVICES))
    for kind in _DEVICES:
        _require_known(f"[{kind}] ", _section(top, kind), _PARTS)
    fixed, mutable, acceptable = ({**_section(top, part), **_section(_section(top, device), part)} for part in _PARTS)
    command = fixed.pop("command", None)
    if not isinstance(command, str):
        raise InvalidInputError('[fixed] needs a command, such as command = "bench convolutions"')
    if not acceptable:
        raise InvalidInputError("[acceptable] has no criterion")
    for key, value in fixed.items():
        if isinstance(value, (list, dict)) or key in mutable:
            raise InvalidInputError(f"[fixed] {key} is {shown(value)}; it must be one value, and not in [mutable], too")
    # A text with commas is one value, for options that take several: the command then measures them in turns.
    axes = {key: value if isinstance(value, list) else [value] for key, value in mutable.items()}
    runs = {}
    for chosen in product(*axes.values()):
        options = {**fixed, **dict(zip(axes, chosen, strict=True))}
        varied = [str(options[key]) for key, values in axes.items() if len(values) > 1]
        runs["-".join(re.sub(r"[^\w.]+", "-", text).strip("-.") for text in varied) or "results"] = options
    return Recipe(
        title=str(top.get("title", name)),
        takes=str(top.get("takes", "")),
        published=tuple(map(str, top.get("published", ()))),
        command=command,
        runs=runs,
        criteria=tuple(_criterion(key, value) for key, value in acceptable.items()),
    )


def _section(outer: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = outer.get(name, {})
    if not isinstance(section, dict):
        raise InvalidInputError(f"{name} is {shown(section)}; it must be a section, [{name}]")
    return section


def _require_known(section: str, keys: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for key in keys:
        if key not in allowed:
            hint = f"{did_you_mean(key, allowed)}allowed: {', '.join(allowed)}"
            raise InvalidInputError(f"{section}{key} is not known; {hint}")


def _criterion(name: str, value: Any) -> Criterion:
    if not isinstance(value, dict) or sum(key in _BOUNDS for key in value) != 1:
        raise InvalidInputError(f"[acceptable] {name} is {shown(value)}; write {{ at-least = ... }} or at-most")
    options = {key: option for key, option in value.items() if key not in _BOUNDS}
    _require_known(f"[acceptable] {name}: ", options, _OF_CRITERION)
    is_most = "at-most" in value
    bound = value["at-most" if is_most else "at-least"]
    return Criterion(name, bound, _number(bound, f"[acceptable] {name}"), is_most, **options)


def _number(bound: Any, name: str) -> float:
    """Return a bound, a number or a text such as ``64MiB`` or ``10ms``, as a number."""
    if not isinstance(bound, str):
        return real(bound, name)
    for parse in (parse_bytes, parse_seconds):
        with suppress(InvalidInputError):
            if (parsed := parse(bound)) is not None:
                return float(parsed)
    raise InvalidInputError(f"{name} is {shown(bound)}; it must be a number, a size such as 64MiB, or a time")


def judge(criterion: Criterion, folders: Mapping[str, ResultFolder]) -> tuple[str, bool]:
    """Return the worst value of a criterion in all folders, with its place, and whether the criterion is met.

    A speedup is the geometric mean over all rows of one dtype, memory format, policy and limit. Of its interval the
    better end counts. Without measurements the criterion is not met.
    """
    judged: list[tuple[float, str, Estimate]] = []  # how far beyond the bound, where, and the value
    for name, folder in folders.items():
        lines = _fastest(folder, criterion.fastest) if criterion.fastest else folder.lines
        ours = [line for line in lines if line["contestant"] == criterion.of]
        ours = [line for line in ours if all(line.get(column) == value for column, value in criterion.where.items())]
        for choice, group in groupby(sorted(ours, key=_choice), _choice):
            pairs = [(line, _rival(line, criterion.rival, lines, folder)) for line in group]
            if criterion.value == _SPEEDUP:
                samples = [(rival["samples_s"], line["samples_s"]) for line, rival in pairs if rival]
                estimates = [mean_speedup([(theirs, own) for theirs, own in samples if theirs and own])]
            else:
                numbers = [number for pair in pairs if (number := _value(criterion, *pair)) is not None]
                estimates = [*map(Estimate, [sum(numbers)] if criterion.total and numbers else numbers)]
            place = ", ".join((name, *filter(None, choice)))
            for estimate in estimates:
                better = estimate.low if criterion.is_most else estimate.high
                beyond = (estimate.value if isnan(better) else better) - criterion.limit
                judged.append((beyond if criterion.is_most else -beyond, place, estimate))
    judged = [place for place in judged if not isnan(place[-1].value)]
    if not judged:
        return "no measurement to judge this by", False
    missed_by, place, worst = max(judged, key=itemgetter(0))
    is_size = criterion.value.endswith("_bytes") and " / " not in criterion.value and not criterion.over
    value = format_bytes(int(worst.value)) if is_size else f"{worst.value:.6g}"
    interval = "" if isnan(worst.low) else f", {worst.low:.6g} to {worst.high:.6g}"
    return f"{value}{interval} ({place})", missed_by <= 0


def _choice(line: Line) -> tuple[str, ...]:
    """Return dtype, memory format, policy and limit of a row as texts, empty if it has none."""
    limit = "" if line["limit_bytes"] is None else format_bytes(line["limit_bytes"])
    return (*(line.get(name) or "" for name in ("dtype", "memory_format", "policy")), limit)


def _fastest(folder: ResultFolder, column: str) -> list[Line]:
    """Return of the rows that differ in this column alone the fastest, without its value; those that failed last."""
    rows = grouped(
        ((line["turns"], row_key({**line, column: None}, folder.header)), {**line, column: None})
        for line in folder.lines
    )
    return [min(group, key=lambda line: _column(line, "time_s") or inf) for group in rows.values()]


def _rival(line: Line, over: str, lines: Sequence[Line], folder: ResultFolder) -> Line | None:
    """Return the row of the contestant ``over`` on the same subject, in the same rounds; None if there is none.

    Of several rows, that with the same limit, or else with the same policy.
    """
    subject_of = itemgetter("turns", *folder.header.subject_columns)
    rivals = [row for row in lines if row["contestant"] == over and subject_of(row) == subject_of(line)]
    for column in ("limit_bytes", "policy"):
        equal = [row for row in rivals if row[column] == line[column]]
        rivals = equal if equal and len(rivals) > 1 else rivals
    return rivals[0] if len(rivals) == 1 else None


def _value(criterion: Criterion, line: Line, rival: Line | None) -> float | None:
    """Return the value of a row, over its rival's if the criterion names one; None if either is unknown."""
    value = _column(line, criterion.value)
    if not criterion.over:
        return value
    divisor = None if rival is None else _column(rival, criterion.value)
    return None if value is None or not divisor else value / divisor


def _column(line: Line, name: str) -> float | None:
    first, _, second = name.partition(" / ")
    if second:
        dividend, divisor = _column(line, first), _column(line, second)
        return None if dividend is None or not divisor else dividend / divisor
    if name == "failures":
        return float(not line["samples_s"])
    if name == "time_s":
        return median(line["samples_s"]) if line["samples_s"] else None
    number: float | None = line.get(name)
    return number
