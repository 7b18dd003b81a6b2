"""Report of training steps: a table for people, CSV and JSON for programs, a row for each variant and setting."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from rich.table import Table

from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import memory_bound, milliseconds, new_table, ratio
from mucudnn.bench.suites.training.result import StepCost, Variant, VariantResult
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.units import format_bytes

_COLUMNS: Mapping[str, Callable[[StepCost, StepCost | None], str]] = {  # the second is torch's, where it did not fail
    "step ms": lambda cost, torchs: milliseconds(cost.time_s),
    "IQR / median": lambda cost, torchs: f"{cost.noise:.1%}",
    "speedup": lambda cost, torchs: "" if torchs is None else ratio(torchs.time_s / cost.time_s),
    "peak memory": lambda cost, torchs: format_bytes(cost.peak_bytes),
    "ratio": lambda cost, torchs: "" if torchs is None else f"{cost.peak_bytes / torchs.peak_bytes:.3f}",
}


def training_steps_table(cells: Sequence[VariantResult], config: Config) -> Table:
    """Times and peaks; speedup and memory are to torch's of the same precision and memory format."""
    first = cells[0].setting
    title = f"{first.network}, batch {first.batch_size}: training steps, {memory_bound(config)}"
    printed = new_table(title, ("precision", "memory format", "convolutions"), [*_COLUMNS])
    for cell in cells:
        setting = cell.setting
        printed.add_row(setting.precision, setting.memory_format, cell.variant, *_numbers(cell, cells))
    printed.caption = "speedup and memory to torch of the same precision and memory format"
    return printed


def training_record(cells: Sequence[VariantResult], config: Config, environment: Environment, rounds: int) -> Record:
    """The object that ``mucudnn bench training --json`` writes; ``cells`` are the lines of the CSV file."""
    return {
        **record_header(config, environment, datetime.now(UTC)),
        "rounds": rounds,
        "cells": training_rows(cells),
    }


def training_rows(cells: Sequence[VariantResult]) -> list[Record]:
    """Lines of the CSV file: one for each result; numbers are empty where there is a failure."""
    return [_row(cell) for cell in cells]


def _row(cell: VariantResult) -> Record:
    setting, cost = cell.setting, cell.cost
    return {
        "network": setting.network,
        "batch_size": setting.batch_size,
        "device": setting.device,
        "precision": setting.precision.value,
        "memory_format": setting.memory_format.value,
        "variant": cell.variant.value,
        "time_s": None if cost is None else cost.time_s,
        "noise": None if cost is None else cost.noise,
        "peak_bytes": None if cost is None else cost.peak_bytes,
        "failure": cell.failure,
    }


def _numbers(cell: VariantResult, cells: Sequence[VariantResult]) -> list[str]:
    if cell.cost is None:
        return [cell.failure]
    torchs = next(c.cost for c in cells if c.setting == cell.setting and c.variant is Variant.TORCH)
    return [shown(cell.cost, torchs) for shown in _COLUMNS.values()]
