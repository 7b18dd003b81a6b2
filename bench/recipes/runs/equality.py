"""Runs training with torch's and with mucudnn's convolutions, step by step from the same seed."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from mucudnn.bench.recipes.benchmarks import Cell, Place
from mucudnn.bench.recipes.settings import config_of
from mucudnn.bench.suites.accuracy.equality import STEPS, benchmark_equality
from mucudnn.words.config import DEFAULT_WORKSPACE_LIMIT, BatchSizePolicy
from mucudnn.words.units import parse_bytes


def run(cell: Cell, out: Path, place: Place) -> None:
    """Measure a cell into the folder ``out``. Raises what ``benchmark_equality`` raises."""
    settings = cell.settings
    policies = settings.get("policy", (BatchSizePolicy.POWER_OF_TWO,))
    limits = settings.get("workspace_limit", (parse_bytes(DEFAULT_WORKSPACE_LIMIT),))
    configs = [
        config_of(settings, policy=policy, workspace_limit=limit, database=place.database)
        for policy, limit in product(policies, limits)
    ]
    benchmark_equality(
        cell.source,
        configs,
        out,
        batch_size=settings.get("batch", 1),
        steps=settings.get("steps", STEPS),
        device=place.device,
        progress=place.progress,
    )
