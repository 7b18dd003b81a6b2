"""Runs the solver that divides budgets over a network: the size of the paper's integer program, and its time."""

from __future__ import annotations

from pathlib import Path

from mucudnn.bench.recipes.benchmarks import Cell, Place
from mucudnn.bench.recipes.runs.convolutions import table_of
from mucudnn.bench.recipes.settings import config_of
from mucudnn.bench.suites.solver import ROUNDS, benchmark_division
from mucudnn.words.config import BatchSizePolicy


def run(cell: Cell, out: Path, place: Place) -> None:
    """Measure a cell into the folder ``out``. Raises what ``benchmark_division`` raises."""
    settings, table = cell.settings, table_of(cell)
    config = config_of(settings, workspace_limit=None, database=place.database)
    problems = len(table.problems(config.operations))
    benchmark_division(
        table,
        config,
        settings.get("policy", (BatchSizePolicy.POWER_OF_TWO,)),
        [budget.of(problems) for budget in settings["workspace_budget"]],
        out,
        rounds=settings.get("rounds", ROUNDS),
        device=place.device,
        progress=place.progress,
    )
