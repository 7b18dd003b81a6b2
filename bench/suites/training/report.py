"""Report of training steps: tables for people, CSV and JSON for programs, a row for each variant and setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby

from rich.table import Table

from mucudnn.bench.contests.kind_times import median_by_kind, shares
from mucudnn.bench.contests.step_split import StepSplit
from mucudnn.bench.contests.variants import Variant
from mucudnn.bench.report.records import Record, key_of, record_header
from mucudnn.bench.report.tables import images_per_s, memory_bound, milliseconds, new_table, ratio
from mucudnn.bench.suites.training.result import How, StepCost, VariantResult
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.units import format_bytes

_COLUMNS: Mapping[str, Callable[[StepCost, StepCost | None, int], str]] = {  # torch's, where it did not fail; n
    "step ms": lambda cost, torchs, n: milliseconds(cost.time_s),
    "images/s": lambda cost, torchs, n: images_per_s(n, cost.time_s),
    "IQR / median": lambda cost, torchs, n: f"{cost.noise:.1%}",
    "speedup": lambda cost, torchs, n: "" if torchs is None else ratio(torchs.time_s / cost.time_s),
    "peak memory": lambda cost, torchs, n: format_bytes(cost.peak_bytes),
    "ratio": lambda cost, torchs, n: "" if torchs is None else f"{cost.peak_bytes / torchs.peak_bytes:.3f}",
}


_SPLIT = ("forward ms", "backward ms", "speedup", "rest ms", "rest ratio")
_SUMMARY = ("torch ms", "mucudnn ms", "speedup", "in convolutions", "their share", "rest ratio")


def training_tables(cells: Sequence[VariantResult], config: Config) -> Iterator[Table]:
    """Up to three tables for each source, and a summary if there are several."""
    networks = [[*group] for _, group in groupby(cells, lambda cell: (cell.setting.network, cell.setting.batch_size))]
    for group in networks:
        yield training_steps_table(group, config)
        if any(cell.cost is not None and cell.cost.split is not None for cell in group):
            yield training_split_table(group)
        if any(cell.cost is not None and cell.cost.kinds_s for cell in group):
            yield training_kinds_table(group)
    if len(networks) > 1:
        yield training_summary(cells, config)


def training_summary(cells: Sequence[VariantResult], config: Config) -> Table:
    """A row for each network, precision and memory format: mucudnn's step against torch's."""
    title = f"training steps, {memory_bound(config)}"
    printed = new_table(title, ("network", "batch", "precision", "memory format"), _SUMMARY)
    for cell in cells:
        setting = cell.setting
        if cell.variant is Variant.MUCUDNN:
            left = setting.network, str(setting.batch_size), setting.precision, setting.memory_format
            printed.add_row(*left, *_summed_up(cell, _torchs(cell, cells)))
    printed.caption = (
        "speedups of the step, and of its convolutions in place; their share of torch's step; rest: all but them"
    )
    return printed


def training_split_table(cells: Sequence[VariantResult]) -> Table:
    """Times of one network's convolutions in place, and of the rest; ratios as in ``training_steps_table``."""
    first = cells[0].setting
    title = f"{first.network}, batch {first.batch_size}: where the time of a step goes"
    printed = new_table(title, ("precision", "memory format", "convolutions"), _SPLIT)
    for cell in cells:
        if cell.cost is not None and cell.cost.split is not None:
            setting, torchs = cell.setting, _torchs(cell, cells)
            left = setting.precision, setting.memory_format, _name(cell)
            printed.add_row(*left, *_parts(cell.cost.split, None if torchs is None else torchs.split))
    printed.caption = (
        "forward, backward: convolutions, timed in place in rounds of their own; rest: all that is not a convolution"
    )
    return printed


def training_kinds_table(cells: Sequence[VariantResult]) -> Table:
    """Shares of the kinds of layers in the time of one network's steps."""
    first, costs = cells[0].setting, [cell.cost for cell in cells if cell.cost is not None]
    kinds = [*median_by_kind([cost.kinds_s for cost in costs if cost.kinds_s])]
    title = f"{first.network}, batch {first.batch_size}: share of time by kind of layer, %"
    printed = new_table(title, ("precision", "memory format", "convolutions"), kinds)
    for cell in cells:
        if cell.cost is not None and cell.cost.kinds_s:
            of = shares(cell.cost.kinds_s)
            texts = (f"{100 * of[kind]:.1f}" if kind in of else "" for kind in kinds)
            printed.add_row(cell.setting.precision, cell.setting.memory_format, _name(cell), *texts)
    printed.caption = "timed in place in steps of their own; of what is compiled, all but convolutions is the rest"
    return printed


def training_steps_table(cells: Sequence[VariantResult], config: Config) -> Table:
    """Times and peaks of one network; speedup and memory are to torch's of the same precision and memory format."""
    first = cells[0].setting
    title = f"{first.network}, batch {first.batch_size}: training steps, {memory_bound(config)}"
    printed = new_table(title, ("precision", "memory format", "convolutions"), [*_COLUMNS])
    for cell in cells:
        setting = cell.setting
        printed.add_row(setting.precision, setting.memory_format, _name(cell), *_numbers(cell, cells))
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
    kinds = median_by_kind([cell.cost.kinds_s for cell in cells if cell.cost is not None])
    return [{**_row(cell, _torchs(cell, cells)), **_kinds(cell, kinds)} for cell in cells]


def _kinds(cell: VariantResult, kinds: Iterable[str]) -> Record:
    """Columns of the kinds of layers that any of the results has."""
    found = {} if cell.cost is None else cell.cost.kinds_s
    return {f"kind_{key_of(kind).replace(' ', '_')}_s": found.get(kind) for kind in kinds}


def _row(cell: VariantResult, torchs: StepCost | None) -> Record:
    setting, cost = cell.setting, cell.cost
    split = None if cost is None else cost.split
    torchs_split = None if torchs is None else torchs.split
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
        "forward_convolutions_s": None if split is None else split.forward_s,
        "backward_convolutions_s": None if split is None else split.backward_s,
        "rest_s": None if split is None else split.rest_s,
        "how": setting.how.value,
        "images_per_s": None if cost is None else setting.batch_size / cost.time_s,
        "rest_ratio": None if split is None or torchs_split is None else split.rest_s / torchs_split.rest_s,
    }


def _numbers(cell: VariantResult, cells: Sequence[VariantResult]) -> list[str]:
    if cell.cost is None:
        return [cell.failure]
    torchs = _torchs(cell, cells)
    return [shown(cell.cost, torchs, cell.setting.batch_size) for shown in _COLUMNS.values()]


def _name(cell: VariantResult) -> str:
    """Name of a variant, and how mucudnn got into it if that is not as always."""
    is_enabled = cell.variant is Variant.MUCUDNN and cell.setting.how is How.ENABLE
    return f"{cell.variant}, enabled" if is_enabled else cell.variant


def _torchs(cell: VariantResult, cells: Sequence[VariantResult]) -> StepCost | None:
    """Cost of torch's own step in the same setting."""
    return next(c.cost for c in cells if c.setting == cell.setting and c.variant is Variant.TORCH)


def _parts(split: StepSplit, torchs: StepSplit | None) -> list[str]:
    """Texts under ``_SPLIT``."""
    speedup = "" if torchs is None else ratio(torchs.convolutions_s / split.convolutions_s)
    rest_ratio = "" if torchs is None else f"{split.rest_s / torchs.rest_s:.3f}"
    forward, backward, rest = map(milliseconds, (split.forward_s, split.backward_s, split.rest_s))
    return [forward, backward, speedup, rest, rest_ratio]


def _summed_up(cell: VariantResult, torchs: StepCost | None) -> list[str]:
    """Texts under ``_SUMMARY``; the reason where there is nothing to compare."""
    ours = cell.cost
    if ours is None or torchs is None:
        return [cell.failure or "torch's own failed"]
    texts = [milliseconds(torchs.time_s), milliseconds(ours.time_s), ratio(torchs.time_s / ours.time_s)]
    if ours.split is None or torchs.split is None:
        return texts
    share = torchs.split.convolutions_s / (torchs.split.convolutions_s + torchs.split.rest_s)
    _, _, speedup, _, rest_ratio = _parts(ours.split, torchs.split)
    return [*texts, speedup, f"{share:.0%}", rest_ratio]
