"""Lists the benchmarks that recipes can run: their settings, and the function that runs them. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mucudnn.bench.recipes.sections import Parse
from mucudnn.bench.recipes.settings import CONFIG, GRID, PICKED, SHAPES, SOURCES, count, seconds
from mucudnn.words.progress import Progress, silent
from mucudnn.words.values import flag, whole


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

    Of its name is a module of ``runs``, whose function ``run`` measures a cell into a folder. contestants: the first is
    what speedups are over, the last what is judged, unless a criterion says otherwise. measures: what its rows can be
    judged by. keys: of the settings. needed: one without which there is nothing to run; empty: there is none.
    """

    name: str
    contestants: tuple[str, ...]
    measures: tuple[str, ...]
    keys: Mapping[str, Parse]
    needed: str = ""

    @property
    def grid(self) -> tuple[str, ...]:
        """Keys whose alternatives are measured in one folder; every alternative of others has its own."""
        return tuple(key for key in self.keys if key in GRID)

    @property
    def run(self) -> Callable[[Cell, Path, Place], None]:
        """The function that measures a cell into a folder, and goes on where it stopped."""
        function: Callable[[Cell, Path, Place], None] = import_module(f"mucudnn.bench.recipes.runs.{self.name}").run
        return function


def _of(keys: Mapping[str, Parse], *names: str) -> dict[str, Parse]:
    return {name: keys[name] for name in names}


_DIFFERENCES = ("loss_difference", "gradient_difference", "loss_over_yardstick", "gradient_over_yardstick")
_BENCHMARKS = (
    Benchmark(
        "convolutions",
        ("torch", "torch-benchmark-10", "torch-benchmark-0", "undivided", "mucudnn-wd", "mucudnn"),
        ("speedup", "error", "workspace", "share_of_limit", "time", "failures"),
        {**SOURCES, **PICKED, **SHAPES, **CONFIG, **GRID, "at_best": flag, "rounds": count, "time_limit": seconds},
    ),
    Benchmark(
        "program",
        ("solver",),
        ("workspace", "share_of_limit", "time", "failures", "gap", "options"),
        {**SOURCES, **PICKED, **SHAPES, **CONFIG, **_of(GRID, "policy", "workspace_budget"), "rounds": count},
        needed="workspace_budget",
    ),
    Benchmark(
        "equality",
        ("torch", "mucudnn"),
        ("speedup", "error", "time", "failures", *_DIFFERENCES),
        {
            **_of(SOURCES, "networks"),
            **_of(SHAPES, "batch"),
            **CONFIG,
            **_of(GRID, "policy", "workspace_limit"),
            "steps": partial(whole, least=2),
        },
    ),
)
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({one.name: one for one in _BENCHMARKS})
