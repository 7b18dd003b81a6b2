"""Acceptance criteria of recipes (experiments in TOML files). The module ``judging`` applies them to results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from mucudnn.bench.recipes.sections import Section, one_of
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import Operation
from mucudnn.words.units import exact_bytes, format_bytes, parse_bytes, parse_seconds
from mucudnn.words.values import member, real, shown, text


@dataclass(frozen=True, slots=True)
class Measure:
    """A quantity that acceptance criteria bound.

    column: column of the result rows, or empty for a speedup. parse: parses a bound. write: formats a value. is_sum:
    whether the sum of the rows' values is judged, instead of the worst value.
    """

    column: str
    parse: Callable[[Any, str], Any]
    write: Callable[[Any], str]
    is_sum: bool = False


def _size(value: object, name: str) -> int:
    size = parse_bytes(value)  # type: ignore[arg-type]  # checked by parse_bytes
    if size is None:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a size, such as 64MiB")
    return size


def _time(value: object, name: str) -> float:
    seconds = parse_seconds(value)  # type: ignore[arg-type]
    if seconds is None:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a time, such as 500ms")
    return seconds


def _number(value: float) -> str:
    return f"{value:.6g}"


def size_in_words(value: float) -> str:
    """Format a size in bytes, with all digits if rounding would change it.

    >>> size_in_words(2**26), size_in_words(2**26 - 1)
    ('64 MiB', '67108863B (64 MiB)')
    """
    text = format_bytes(int(value))
    return text if parse_bytes(text) == value else exact_bytes(int(value))


_PLAIN = partial(Measure, parse=real, write=_number)
MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "speedup": Measure("", real, lambda value: f"{_number(value)}×"),
        **{name: _PLAIN(name) for name in ("share_of_limit", "gap", "options")},
        "error": _PLAIN("relative_error"),
        "workspace": Measure("workspace_bytes", _size, size_in_words),
        "time": Measure("time_s", _time, lambda value: f"{_number(value * 1e3)} ms"),
        "failures": _PLAIN("failures", is_sum=True),
    }
)


@dataclass(frozen=True, slots=True)
class Criterion:
    """A requirement on the results of a recipe, met if it holds in every folder, for every selected policy and limit.

    at_least, at_most: inclusive bounds, one of which is None. of: the contestant that is judged. over: the contestant
    that a speedup is relative to. where: values of columns that select the rows. place: file and line.
    """

    measure: str
    of: str
    at_least: float | None = None
    at_most: float | None = None
    over: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False)

    def __str__(self) -> str:
        name = self.measure.replace("_", " ")
        over = f" over {self.over}" if self.over else ""
        chosen = [_in_words(name, value) for name, value in self.where.items()]
        bound = f"{'at least' if self.at_most is None else 'at most'} {MEASURES[self.measure].write(self.bound)}"
        return ", ".join((f"{name} of {self.of}{over} {bound}", *chosen))

    @property
    def bound(self) -> Any:
        return self.at_least if self.at_most is None else self.at_most


def _in_words(name: str, value: object) -> str:
    if name == "limit_bytes":
        return format_bytes(None if value is None else int(str(value)))
    return str(value).replace("_", " ")


_BOUNDS = ("at_least", "at_most")
_SELECTING = {"operation": "operation", "layer": "layer", "policy": "policy", "workspace_limit": "limit_bytes"}


def read_criteria(
    places: Mapping[str, Section], measures: Sequence[str], contestants: Sequence[str], grid: Mapping[str, Any]
) -> tuple[Criterion, ...]:
    """Read the acceptance criteria in the section ``[accept]`` of a recipe.

    places: the section of each measure. measures, contestants: those of the benchmark. grid: the alternatives of each
    key that varies within a folder. Raises ``InvalidInputError`` for a criterion that could never be judged.
    """
    criteria = []
    for measure, section in places.items():
        section.require_known(measures)
        value = section.values[measure]
        demands = value if isinstance(value, list) else [value]
        if not demands or not all(isinstance(one, Mapping) for one in demands):
            section.refuse(measure, f"is {shown(value)}; write {measure} = {{ at_most = ... }}, or a list of these")
        parse = partial(_criterion, contestants=contestants, grid=grid)
        place = section.place(measure)
        criteria += [replace(section.parsed(measure, demand, parse), place=place) for demand in demands]
    return tuple(criteria)


def _criterion(value: object, measure: str, contestants: Sequence[str], grid: Mapping[str, Any]) -> Criterion:
    demand: dict[str, Any] = dict(value)  # type: ignore[call-overload]  # a mapping, as was checked
    allowed = (*_BOUNDS, "of", *(("over",) if measure == "speedup" else ()), *_SELECTING)
    for key in demand:
        if key not in allowed:
            raise InvalidInputError(f"has the unknown key {key!r}; allowed are {', '.join(allowed)}")
    bounds = {key: MEASURES[measure].parse(demand[key], key) for key in _BOUNDS if key in demand}
    if len(bounds) != 1:
        raise InvalidInputError("must have one bound: at_least or at_most")
    of = one_of(demand.get("of", contestants[-1]), "of", contestants)
    over = one_of(demand.get("over", contestants[0]), "over", contestants) if measure == "speedup" else None
    where = {column: _selected(key, demand[key], grid) for key, column in _SELECTING.items() if key in demand}
    return Criterion(measure, of, **bounds, over=over, where=where)


def _selected(key: str, value: object, grid: Mapping[str, Any]) -> object:
    """Return the value by which a criterion selects rows. Raises ``InvalidInputError`` if no row can have the value."""
    wanted = text(value, key)
    if key == "layer":
        return wanted
    if key == "workspace_limit":
        size, tried = parse_bytes(wanted), grid.get(key, ())
        if size not in tried:
            sizes = ", ".join(format_bytes(each) for each in tried) or "none"
            raise InvalidInputError(f"{key} is {shown(value)}, which is not part of the grid: it has {sizes}")
        return size
    if key == "operation":
        return str(member(Operation, wanted, key))
    return one_of(wanted, key, [str(each) for each in grid.get(key, ())])
