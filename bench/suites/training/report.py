"""Report of training steps: a table for people, CSV and JSON for programs, a row for each variant and setting."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.table import Table

from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import memory_bound, milliseconds, new_table, ratio
from mucudnn.bench.suites.training.result import Variant, VariantResult
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.units import format_bytes


def training_steps_table(cells: Sequence[VariantResult], config: Config) -> Table:
    """Times and peaks; speedup and memory are to torch's of the same precision and memory format."""
    first = cells[0].setting
    columns = ("step ms", "IQR / median", "speedup", "peak memory", "ratio")
    title = f"{first.network}, batch {first.batch_size}: training steps, {memory_bound(config)}"
    printed = new_table(title, ("precision", "memory format", "convolutions"), columns)
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


def _numbers(cell: VariantResult, cells: Sequence[VariantResult]) -> tuple[str, ...]:
    cost = cell.cost
    if cost is None:
        return (cell.failure,)
    shown = milliseconds(cost.time_s), f"{cost.noise:.1%}"
    baseline = next(c.cost for c in cells if c.setting == cell.setting and c.variant is Variant.TORCH)
    if baseline is None:
        return *shown, "", format_bytes(cost.peak_bytes), ""
    compared = ratio(baseline.time_s / cost.time_s), f"{cost.peak_bytes / baseline.peak_bytes:.3f}"
    return *shown, compared[0], format_bytes(cost.peak_bytes), compared[1]
