"""Runs convolutions under every policy, limit and budget of a recipe, in the same turns, problem by problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mucudnn.bench.recipes.benchmarks import Cell, Place
from mucudnn.bench.recipes.settings import config_of
from mucudnn.bench.sources.layers import LayerTable, load_source, with_filters
from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
from mucudnn.bench.suites.convolutions.choices import ROUNDS, Choices
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.errors import InvalidInputError

_SHAPES = ("batch", "dtype", "memory_format")


def run(cell: Cell, out: Path, place: Place) -> None:
    """Measure a cell into the folder ``out``. Raises what ``benchmark_convolutions`` raises."""
    settings = cell.settings
    table = table_of(cell)
    config = config_of(settings, workspace_limit=None, database=place.database)
    problems = len(table.problems(config.operations))
    is_bounded = "workspace_budget" in settings or settings.get("at_best", False)
    choices = Choices(
        policies=tuple(settings.get("policy", (BatchSizePolicy.POWER_OF_TWO,))),
        limits=tuple(settings.get("workspace_limit", () if is_bounded else (None,))),
        budgets=tuple(budget.of(problems) for budget in settings.get("workspace_budget", ())),
        at_best=settings.get("at_best", False),
        rounds=settings.get("rounds", ROUNDS),
        time_limit_s=settings.get("time_limit"),
    )
    benchmark_convolutions("convolutions", table, config, choices, out, device=place.device, progress=place.progress)


def table_of(cell: Cell) -> LayerTable:
    """Return the layers of a cell. Raises ``InvalidInputError`` for those that its source does not have."""
    settings = cell.settings
    table = load_source(cell.source, **{name: settings[name] for name in _SHAPES if name in settings})
    if "filters" in settings:
        table = with_filters(table, settings["filters"])
    return _picked(table, settings)


def _picked(table: LayerTable, settings: Mapping[str, Any]) -> LayerTable:
    names = settings.get("layers")
    if names is None:
        return table
    there_are = [name for layer in table.layers for name in layer.names]
    if unknown := [name for name in names if name not in there_are]:
        raise InvalidInputError(f"{table.source} has no layer {unknown[0]!r}; it has {', '.join(there_are)}")
    return replace(table, layers=tuple(layer for layer in table.layers if set(names) & set(layer.names)))
