"""Lists the benchmarks that recipes can run: their settings, and the function that runs them. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mucudnn.bench.recipes.sections import Parse
from mucudnn.bench.recipes.settings import CONFIG, GRID, MEASURING, PICKED, SHAPES, SOURCES
from mucudnn.words.progress import Progress, silent
from mucudnn.words.values import flag


@dataclass(frozen=True, slots=True)
class Cell:
    """One result folder of a recipe. settings: a value for each key, but all alternatives for those of the grid."""

    name: str
    source: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Device and files with which a recipe runs. database: file of the measurements; ``None``: the user's own."""

    device: str = "cpu"
    database: Path | None = None
    progress: Progress = field(default=silent, compare=False)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark as recipes name it.

    module: of ``runs``, whose function ``run`` measures a cell into a folder. contestants: the first is what speedups
    are over, the last what is judged, unless a criterion says otherwise. keys: of the settings. grid: those of them
    whose alternatives are measured in one folder, in the same turns; every alternative of others has its own.
    """

    module: str
    contestants: tuple[str, ...]
    keys: Mapping[str, Parse]
    grid: tuple[str, ...] = ()

    @property
    def run(self) -> Callable[[Cell, Path, Place], None]:
        """The function that measures a cell into a folder, and goes on where it stopped."""
        function: Callable[[Cell, Path, Place], None] = import_module(f"mucudnn.bench.recipes.runs.{self.module}").run
        return function


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        "convolutions": Benchmark(
            "convolutions",
            ("torch", "torch-benchmark-10", "torch-benchmark-0", "undivided", "mucudnn-wd", "mucudnn"),
            {**SOURCES, **PICKED, **SHAPES, **CONFIG, **GRID, **MEASURING, "at_best": flag},
            tuple(GRID),
        ),
    }
)
