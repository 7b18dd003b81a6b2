"""Report of data-parallel training: a table for people, CSV and JSON for programs, a row for each kind of step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from rich.table import Table

from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import memory_bound, milliseconds, new_table, ratio
from mucudnn.bench.suites.data_parallel.result import DataParallelResult, StepTimes

_COLUMNS: Mapping[str, Callable[[DataParallelResult, StepTimes], str]] = {
    "step ms": lambda result, step: milliseconds(step.step_s),
    "IQR / median": lambda result, step: f"{step.noise:.1%}",
    "speedup": lambda result, step: ratio(_speedup(result, step)),
    "samples/s": lambda result, step: f"{_throughput(result, step):.1f}",
    "convolutions ms": lambda result, step: milliseconds(step.split.convolutions_s),
    "other compute ms": lambda result, step: milliseconds(step.split.rest_s),
    "exposed ms": lambda result, step: milliseconds(step.exposed_s),
    "buckets": lambda result, step: str(len(step.bucket_bytes)),
    "ranks equal": lambda result, step: f"{step.equality.equal} of {step.equality.checked}",
}


def data_parallel_table(result: DataParallelResult) -> Table:
    """A row for each bucket size and kind of convolution; speedups are to torch's with the same buckets."""
    setting = result.setting
    title = (
        f"{setting.source}, {setting.ranks} ranks of {setting.batch_size} samples, {setting.communication}: "
        f"data-parallel steps, {memory_bound(result.config)}"
    )
    printed = new_table(title, ("bucket_cap_mb", "convolutions"), [*_COLUMNS])
    for step in result.steps:
        cap = "default" if step.bucket_cap_mb is None else f"{step.bucket_cap_mb:g}"
        printed.add_row(cap, step.convolutions, *(shown(result, step) for shown in _COLUMNS.values()))
    printed.caption = (
        "convolutions (timed in place), other compute: of steps without communication; exposed: what a step takes "
        "longer with it"
    )
    return printed


def in_words(result: DataParallelResult) -> str:
    """Say what the ranks computed with, and after which steps they were compared."""
    setting = result.setting
    after = (
        f"after the steps that average the parameters of all ranks, one in {setting.period}"
        if setting.communication.averages_parameters
        else "after each step that is measured, and after the first ones"
    )
    threads = "1 thread" if result.threads == 1 else f"{result.threads} threads"
    each = f", {threads} each" if setting.device == "cpu" else ""
    return f"{setting.ranks} ranks{each}; their parameters were compared bit by bit {after}."


def data_parallel_record(result: DataParallelResult) -> Record:
    """The object that ``mucudnn bench data-parallel --json`` writes; ``steps`` are the lines of the CSV file, and the
    bytes of each bucket."""
    return {
        **record_header(result.config, result.environment, datetime.now(UTC)),
        "rounds": result.rounds,
        "threads": result.threads,
        "steps": [
            {**row, "bucket_bytes": step.bucket_bytes}
            for row, step in zip(data_parallel_rows(result), result.steps, strict=True)
        ],
    }


def data_parallel_rows(result: DataParallelResult) -> list[Record]:
    """Lines of the CSV file; ``bucket_cap_mb`` is empty where it is torch's default."""
    return [_row(result, step) for step in result.steps]


def _row(result: DataParallelResult, step: StepTimes) -> Record:
    setting = result.setting
    return {
        "source": setting.source,
        "ranks": setting.ranks,
        "batch_size": setting.batch_size,
        "device": setting.device,
        "dtype": setting.dtype,
        "memory_format": setting.memory_format.value,
        "communication": setting.communication.value,
        "period": setting.period if setting.communication.averages_parameters else None,
        "bucket_cap_mb": step.bucket_cap_mb,
        "convolutions": step.convolutions.value,
        "step_s": step.step_s,
        "noise": step.noise,
        "speedup": _speedup(result, step),
        "samples_per_s": _throughput(result, step),
        "alone_s": step.alone_s,
        "forward_convolutions_s": step.split.forward_s,
        "backward_convolutions_s": step.split.backward_s,
        "other_s": step.split.rest_s,
        "exposed_s": step.exposed_s,
        "buckets": len(step.bucket_bytes),
        "compared": step.equality.checked,
        "equal": step.equality.equal,
    }


def _speedup(result: DataParallelResult, step: StepTimes) -> float:
    return result.torchs(step).step_s / step.step_s


def _throughput(result: DataParallelResult, step: StepTimes) -> float:
    """Return the samples of all ranks in a second."""
    return result.setting.global_batch / step.step_s
