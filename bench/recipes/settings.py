"""Keys that ``[fixed]`` and ``[mutable]`` may have, and what each of their values may be.

The values of a config are checked by ``Config`` itself, so that recipes allow what commands do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from mucudnn.bench.recipes.sections import Parse
from mucudnn.words.config import BatchSizePolicy, Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat, Pair, dtype_name
from mucudnn.words.units import parse_bytes, parse_seconds
from mucudnn.words.values import flag, member, pair, shown, text, texts, whole

_EACH = " each"  # ends a budget that is so much for each problem
_MOST_FILTER = 2**15


@dataclass(frozen=True, slots=True)
class Budget:
    """A workspace budget (bytes) of a whole network, or as much for each of its problems."""

    size: int
    is_each: bool = False

    def of(self, problems: int) -> int:
        """Return the bytes of the whole.

        >>> Budget(1024, is_each=True).of(problems=10)
        10240
        """
        return self.size * problems if self.is_each else self.size


def _of_config(value: object, name: str) -> Any:
    return getattr(Config(**{name: value}), name)  # type: ignore[arg-type]  # which is what it checks


def _sources(value: object, name: str) -> tuple[str, ...]:
    sources = texts(value, name)
    if not sources or not all(sources):
        raise InvalidInputError(f"{name} is {shown(value)}; name at least one network, as for mucudnn tune")
    return sources


def _filters(value: object, name: str) -> tuple[Pair, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a list of height and width, as [[3, 3], [5, 5]]")
    return tuple(pair(one, name, 1, _MOST_FILTER) for one in value)


def _limit(value: object, name: str) -> int | None:
    return parse_bytes(text(value, name))


def _budget(value: object, name: str) -> Budget:
    """Take a size, or so much for each problem. Raises ``InvalidInputError``."""
    given = text(value, name)
    size = parse_bytes(given.removesuffix(_EACH))
    if size is None:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a size, such as 64MiB, or 8MiB each")
    return Budget(size, given.endswith(_EACH))


def seconds(value: object, name: str) -> float | None:
    """Take a time, such as 10min; none is no bound. Raises ``InvalidInputError``."""
    return parse_seconds(text(value, name))


def _dtype(value: object, name: str) -> str:
    return dtype_name(text(value, name))


count: Parse = partial(whole, least=1)

SOURCES: Mapping[str, Parse] = MappingProxyType({"networks": _sources, "table": text})
CONFIG: Mapping[str, Parse] = MappingProxyType(
    {
        **dict.fromkeys(("operations", "algorithms", "max_relative_error"), _of_config),
        **dict.fromkeys(("deterministic", "strict", "thorough"), flag),
        "tuning_time": seconds,
    }
)
"""Choices of a ``Config``; ``tuning_time`` is its ``time_limit``."""

SHAPES: Mapping[str, Parse] = MappingProxyType(
    {"batch": count, "dtype": _dtype, "memory_format": partial(member, MemoryFormat)}
)
PICKED: Mapping[str, Parse] = MappingProxyType({"layers": texts, "filters": _filters})
GRID: Mapping[str, Parse] = MappingProxyType(
    {"policy": partial(member, BatchSizePolicy), "workspace_limit": _limit, "workspace_budget": _budget}
)


def config_of(cell: Mapping[str, Any], **more: Any) -> Config:
    """Return the config that the settings of a cell make. Raises ``InvalidInputError``."""
    given = {name: cell[name] for name in CONFIG if name in cell}
    time_limit = given.pop("tuning_time", None)
    return Config(**given, time_limit=time_limit, **more)
