"""Report of memory and time of training steps: a table and words for people, a record for programs."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table

from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import images_per_s, memory_bound, milliseconds, new_table, ratio
from mucudnn.bench.suites.memory.result import MemoryBenchmark, MemoryVariant
from mucudnn.words.units import format_bytes


def memory_table(benchmark: MemoryBenchmark) -> Table:
    """A row for torch and one for each variant of mucudnn. Ratios are to torch, speedups are of the whole step."""
    first, n = benchmark.variants[0], benchmark.input_shape[0]
    columns = ("allocator peak", "ratio", "resident peak", "ratio", "step ms", "images/s", "speedup")
    printed = new_table(f"{benchmark.name}, batch {n}: one training step", ("convolutions",), columns)
    torchs = first.peaks.torch_allocator_bytes, first.peaks.torch_resident_bytes
    torch_step = milliseconds(first.step.baseline_s), images_per_s(n, first.step.baseline_s)
    printed.add_row("torch", *_peak(torchs[0], 1.0), *_peak(torchs[1], 1.0), *torch_step, "")
    for variant in benchmark.variants:
        peaks = variant.peaks
        printed.add_row(
            f"mucudnn, {memory_bound(variant.config)}",
            *_peak(peaks.mucudnn_allocator_bytes, peaks.allocator_ratio),
            *_peak(peaks.mucudnn_resident_bytes, peaks.resident_ratio),
            milliseconds(variant.step.time_s),
            images_per_s(n, variant.step.time_s),
            f"{ratio(variant.step.speedup)} ± {variant.step.uncertainty:.2f}",
        )
    return printed


def in_words(benchmark: MemoryBenchmark) -> str:
    """A line for each variant, and one that says what was counted."""
    lines = [
        f"{memory_bound(v.config)}: {v.peaks.allocator_ratio:.3f} of torch's memory, {ratio(v.step.speedup)} as fast"
        for v in benchmark.variants
    ]
    counted = "allocator: on top of parameters, buffers and input"
    if benchmark.runs:
        counted += f"; resident: of a whole process, median of {benchmark.runs}"
    return "\n".join((*lines, counted))


def memory_record(benchmark: MemoryBenchmark) -> Record:
    """The object that ``mucudnn bench memory --json`` writes; its ``config`` is that of the first variant."""
    return {
        **record_header(benchmark.variants[0].config, benchmark.environment, benchmark.date),
        "network": benchmark.name,
        "input_shape": benchmark.input_shape,
        "runs": benchmark.runs,
        "variants": [_record(variant) for variant in benchmark.variants],
    }


def _peak(size_bytes: int | None, to_torch: float | None) -> tuple[str, str]:
    """Cells of one peak; empty where it was not measured."""
    return ("", "") if size_bytes is None or to_torch is None else (format_bytes(size_bytes), f"{to_torch:.3f}")


def _record(variant: MemoryVariant) -> Record:
    return {
        "workspace_limit": variant.config.workspace_limit,
        "workspace_budget": variant.config.workspace_budget,
        **asdict(variant.peaks),
        "allocator_ratio": variant.peaks.allocator_ratio,
        "resident_ratio": variant.peaks.resident_ratio,
        "torch_step_s": variant.step.baseline_s,
        "mucudnn_step_s": variant.step.time_s,
        "speedup": variant.step.speedup,
        "uncertainty": variant.step.uncertainty,
        "rounds": variant.step.rounds,
    }
