"""The functions that run a cell (one result folder) of a recipe, each named after its benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mucudnn.bench.recipes.benchmarks import Cell, Place
from mucudnn.bench.sources.layers import LayerTable, load_source, with_filters
from mucudnn.bench.suites.convolutions.benchmark import benchmark_convolutions
from mucudnn.bench.suites.convolutions.contest import Choices
from mucudnn.bench.suites.solver import benchmark_division
from mucudnn.words.config import BatchSizePolicy
from mucudnn.words.errors import InvalidInputError


def convolutions(cell: Cell, out: Path, place: Place) -> None:
    """Time each convolution problem under every policy, limit and budget, all interleaved."""
    settings, table = cell.settings, _table(cell)
    config = cell.config(workspace_limit=None, database=place.database)
    problems = len(table.problems(config.operations))
    choices = Choices(
        policies=_policies(cell),
        limits=tuple(settings.get("workspace_limit", () if "workspace_budget" in settings else (None,))),
        budgets=tuple(budget.of(problems) for budget in settings.get("workspace_budget", ())),
        time_limit_s=settings.get("time_limit"),
        **cell.given("rounds"),
    )
    benchmark_convolutions(table, config, choices, out, device=place.device, progress=place.progress)


def program(cell: Cell, out: Path, place: Place) -> None:
    """Benchmark dividing a memory budget over a network: size of the paper's integer program, and solving time."""
    table = _table(cell)
    config = cell.config(workspace_limit=None, database=place.database)
    problems = len(table.problems(config.operations))
    budgets = [budget.of(problems) for budget in cell.settings["workspace_budget"]]
    more: dict[str, Any] = {**cell.given("rounds"), "device": place.device, "progress": place.progress}
    benchmark_division(table, config, _policies(cell), budgets, out, **more)


def _policies(cell: Cell) -> tuple[BatchSizePolicy, ...]:
    return tuple(cell.settings.get("policy", (BatchSizePolicy.POWER_OF_TWO,)))


def _table(cell: Cell) -> LayerTable:
    """Return the layers that a cell measures.

    Raises ``InvalidInputError`` if the cell names a layer that the source lacks.
    """
    table = load_source(cell.source, **cell.given("batch", "dtype", "memory_format"))
    if "filters" in cell.settings:
        table = with_filters(table, cell.settings["filters"])
    names = cell.settings.get("layers")
    if names is None:
        return table
    there_are = [name for layer in table.layers for name in layer.names]
    if unknown := [name for name in names if name not in there_are]:
        raise InvalidInputError(f"{table.source} has no layer {unknown[0]!r}; it has {', '.join(there_are)}")
    return replace(table, layers=tuple(layer for layer in table.layers if set(names) & set(layer.names)))
