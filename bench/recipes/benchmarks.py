"""The benchmarks that recipes can run, and the keys allowed in ``[fixed]`` and ``[mutable]``. Imports no torch.

The class ``Config`` checks the values of settings, so that recipes and commands accept the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mucudnn.bench.recipes.sections import Parse
from mucudnn.words.config import SETTINGS, Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat, Pair, dtype_name
from mucudnn.words.progress import Progress, silent
from mucudnn.words.units import parse_bytes, parse_seconds
from mucudnn.words.values import member, pair, shown, text, texts, whole

_EACH = " each"  # suffix of a budget that is multiplied by the number of problems
_MOST_FILTER = 2**15


@dataclass(frozen=True, slots=True)
class Budget:
    """A workspace budget in bytes: for the whole network, or for each problem of the network."""

    size: int
    is_each: bool = False

    def of(self, problems: int) -> int:
        """Return the total budget in bytes for a network with this number of problems.

        >>> Budget(1024, is_each=True).of(problems=10)
        10240
        """
        return self.size * problems if self.is_each else self.size


def _sources(value: object, name: str) -> tuple[str, ...]:
    sources = texts(value, name)
    if not sources or not all(sources):
        raise InvalidInputError(f"{name} is {shown(value)}; name at least one network, as for mucudnn tune")
    return sources


def _filters(value: object, name: str) -> tuple[Pair, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a list of height and width, as [[3, 3], [5, 5]]")
    return tuple(pair(one, name, 1, _MOST_FILTER) for one in value)


def _budget(value: object, name: str) -> Budget:
    """Parse a budget: a size, or a size with the suffix ``each``. Raises ``InvalidInputError`` for other values."""
    given = text(value, name)
    size = parse_bytes(given.removesuffix(_EACH))
    if size is None:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a size, such as 64MiB, or 8MiB each")
    return Budget(size, given.endswith(_EACH))


def _read(parse: Callable[[str], object]) -> Parse:
    """Return a parser that applies ``parse`` to strings, and refuses all other TOML values."""
    return lambda value, name: parse(text(value, name))


_COUNT: Parse = partial(whole, least=1)
_SECONDS = _read(parse_seconds)
SOURCES: Mapping[str, Parse] = MappingProxyType({"networks": _sources, "table": text})
_NAMES = ("operations", "algorithms", "max_relative_error", "deterministic", "strict", "thorough")
_CONFIG: Mapping[str, Parse] = MappingProxyType(
    {
        **{name: SETTINGS[name].metadata["check"] for name in _NAMES},
        "tuning_time": SETTINGS["time_limit"].metadata["check"],
    }
)
"""Fields of a ``Config``; ``tuning_time`` is its ``time_limit``."""

_LAYERS: Mapping[str, Parse] = MappingProxyType(
    {
        **SOURCES,
        **{"layers": texts, "filters": _filters},
        **{"batch": _COUNT, "dtype": _read(dtype_name), "memory_format": partial(member, MemoryFormat)},
    }
)
_GRID: Mapping[str, Parse] = MappingProxyType(
    {"policy": SETTINGS["policy"].metadata["check"], "workspace_limit": _read(parse_bytes), "workspace_budget": _budget}
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A result folder that a recipe (an experiment in TOML) fills, with its source and settings.

    settings: one value for each key; for grid keys, which vary within the folder, all alternatives.
    """

    name: str
    source: str
    settings: Mapping[str, Any]

    def given(self, *names: str) -> dict[str, Any]:
        """Return the settings in ``names`` that the recipe gives."""
        return {name: self.settings[name] for name in names if name in self.settings}

    def config(self, **more: Any) -> Config:
        """Return the settings as a ``Config``. Raises ``InvalidInputError`` for invalid values."""
        chosen = self.given(*_CONFIG)
        time_limit = chosen.pop("tuning_time", None)
        return Config(**chosen, time_limit=time_limit, **more)


@dataclass(frozen=True, slots=True)
class Place:
    """The device, database and progress bar with which a recipe runs. database: a file, or None for the user's own."""

    device: str = "cpu"
    database: Path | None = None
    progress: Progress = field(default=silent, compare=False)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark that recipes can run, named after the function in ``runs`` that runs it.

    contestants: the compared implementations; by default the last one is judged against the first. measures: quantities
    that criteria can bound. keys: names and parsers of the benchmark's settings. needed: a required key, or an empty
    string.
    """

    name: str
    contestants: tuple[str, ...]
    measures: tuple[str, ...]
    keys: Mapping[str, Parse]
    needed: str = ""

    @property
    def grid(self) -> tuple[str, ...]:
        """The settings whose alternatives share a result folder; alternatives of other settings have their own."""
        return tuple(key for key in self.keys if key in _GRID)

    @property
    def run(self) -> Callable[[Cell, Path, Place], None]:
        """The function that measures a cell (one result folder of a recipe), or resumes measuring it."""
        function: Callable[[Cell, Path, Place], None] = getattr(import_module("mucudnn.bench.recipes.runs"), self.name)
        return function


def _of(keys: Mapping[str, Parse], *names: str) -> dict[str, Parse]:
    return {name: keys[name] for name in names}


_BENCHMARKS = (
    Benchmark(
        "convolutions",
        ("torch", "torch-benchmark-10", "torch-benchmark-0", "undivided", "mucudnn-wd", "mucudnn"),
        ("speedup", "error", "workspace", "share_of_limit", "time", "failures"),
        {**_LAYERS, **_CONFIG, **_GRID, "rounds": _COUNT, "time_limit": _SECONDS},
    ),
    Benchmark(
        "program",
        ("solver",),
        ("workspace", "share_of_limit", "time", "failures", "gap", "options"),
        {**_LAYERS, **_CONFIG, **_of(_GRID, "policy", "workspace_budget"), "rounds": _COUNT},
        needed="workspace_budget",
    ),
)
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({one.name: one for one in _BENCHMARKS})
