"""Reads a recipe, an experiment in a TOML file: fixed settings, alternatives and criteria (docs/benchmarks.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mucudnn.bench.recipes.benchmarks import BENCHMARKS, SOURCES, Benchmark, Cell
from mucudnn.bench.recipes.criteria import Criterion, read_criteria
from mucudnn.bench.recipes.sections import Section, alternatives, one_of, read_sections
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.values import several, text, texts

_SUFFIX = ".toml"
_FOLDER = Path(__file__).parent / "shipped"
DEVICES = ("cpu", "cuda")
_SECTIONS = ("fixed", "mutable", "accept")
_SHOWN_SOURCES = {"networks": "networks, a list,", "table": "table, one name"}
_KEYS = ("title", "takes", "benchmark", "published", *_SECTIONS, *DEVICES)


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A recipe (an experiment in a TOML file) as it applies to one type of device.

    text: the whole file. published: published results, as text. settings: all
    alternatives of each key; keys in ``[fixed]`` have only one.
    """

    path: Path
    text: str
    title: str
    benchmark_name: str
    published: tuple[str, ...]
    settings: Mapping[str, tuple[Any, ...]]
    criteria: tuple[Criterion, ...]

    @property
    def benchmark(self) -> Benchmark:
        return BENCHMARKS[self.benchmark_name]

    def cells(self) -> list[Cell]:
        """Return the result folders to fill: one for each source and each combination of settings outside the grid.

        Alternatives of grid settings share one folder.
        """
        grid = {name: values for name, values in self.settings.items() if name in self.benchmark.grid}
        sources = [one for name in SOURCES for value in self.settings.get(name, ()) for one in several(value)]
        others = {name: values for name, values in self.settings.items() if name not in (*grid, *SOURCES)}
        return [
            Cell(_name(str(source), others, chosen), str(source), {**dict(zip(others, chosen, strict=True)), **grid})
            for source in sources
            for chosen in product(*others.values())
        ]


def _name(source: str, others: Mapping[str, tuple[Any, ...]], chosen: tuple[Any, ...]) -> str:
    """Return the name of a result folder: its source and the settings that differ between folders."""
    own = [f"{name}-{_plain(value)}" for (name, every), value in zip(others.items(), chosen, strict=True) if every[1:]]
    return "-".join((_plain(source), *own))


def _plain(value: object) -> str:
    joined = "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return re.sub(r"[^\w.]+", "-", joined).strip("-.") or "source"


def read_recipe(path: Path, device: str = "cpu") -> RecipeFile:
    """Read a recipe for a type of device; sections for this type override the general sections.

    Raises ``InvalidInputError`` with file, line, key, the given value and the allowed ones.
    """
    top = read_sections(path)
    top.require_known(_KEYS)
    title = top.take("title", text, path.stem)
    top.take("takes", text)
    name = top.take("benchmark", partial(one_of, allowed=tuple(BENCHMARKS)), next(iter(BENCHMARKS)))
    benchmark = BENCHMARKS[name]
    for each in DEVICES:
        top.inner(each).require_known(_SECTIONS)
    settings = _settings(_places(top, device, "fixed", "mutable"), benchmark)
    _require_source(top, benchmark, settings)
    if benchmark.needed and benchmark.needed not in settings:
        top.refuse("mutable", f"needs {benchmark.needed}, without which {name} has nothing to run")
    grid = {key: values for key, values in settings.items() if key in benchmark.grid}
    criteria = read_criteria(_places(top, device, "accept"), benchmark.measures, benchmark.contestants, grid)
    if not criteria:
        top.refuse("accept", f"has no criterion; add a section [accept] with some of {', '.join(benchmark.measures)}")
    published = top.take("published", texts, ())
    return RecipeFile(path, top.text, title, name, published, MappingProxyType(settings), criteria)


def _places(top: Section, device: str, *names: str) -> dict[str, Section]:
    """Return the section that applies to each of the keys ``names``: the device's section, or else the general one."""
    found: dict[str, Section] = {}
    for outer in (top, top.inner(device)):
        sections = [outer.inner(name) for name in names]
        for section in sections:
            for key in section.values:
                if others := [one.name for one in sections if one is not section and key in one.values]:
                    section.refuse(key, f"is in [{others[0]}], too; keep it in one of the two")
                found[key] = section
    return found


def _settings(places: Mapping[str, Section], benchmark: Benchmark) -> dict[str, tuple[Any, ...]]:
    """Return all alternatives of each setting of a recipe. Raises ``InvalidInputError`` for invalid values."""
    settings = {}
    for key, section in places.items():
        section.require_known(benchmark.keys)
        parse = benchmark.keys[key]
        is_mutable = section.name.endswith("mutable")
        values = section.take(key, alternatives) if is_mutable else [section.values[key]]
        settings[key] = tuple(dict.fromkeys(section.parsed(key, value, parse) for value in values))
    return settings


def _require_source(top: Section, benchmark: Benchmark, settings: Mapping[str, object]) -> None:
    allowed = [_SHOWN_SOURCES[key] for key in SOURCES if key in benchmark.keys]
    given = [key for key in SOURCES if key in settings]
    if len(given) != 1:
        found = "both are given" if given else "none is given"
        top.refuse("fixed", f"needs {' or '.join(allowed)}: {found}")


def shipped_recipes() -> dict[str, Path]:
    """Return the TOML files of the recipes (experiments) that come with mucudnn, by name."""
    return {path.stem: path for path in sorted(_FOLDER.glob(f"*{_SUFFIX}"))}


def find_recipe(name_or_file: str) -> Path:
    """Return the path of a recipe, given as a file name that ends in .toml, or as the name of one of mucudnn's recipes.

    Raises ``InvalidInputError`` for an unknown name.
    """
    if name_or_file.endswith(_SUFFIX):
        return Path(name_or_file)
    every = shipped_recipes()
    if name_or_file not in every:
        close = get_close_matches(name_or_file, every, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InvalidInputError(
            f"recipe is {name_or_file!r}; {hint}name a file that ends in {_SUFFIX}, or one of {', '.join(every)}"
        )
    return every[name_or_file]
