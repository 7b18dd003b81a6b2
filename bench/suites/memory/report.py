"""Report of memory and time of training steps: a table and words for people, a record for programs."""

from __future__ import annotations

from statistics import median

from rich.table import Table

from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import images_per_s, memory_bound, milliseconds, new_table, ratio
from mucudnn.bench.suites.memory.result import Contestant, MemoryBenchmark, StepMemory
from mucudnn.words.units import format_bytes


def memory_table(benchmark: MemoryBenchmark) -> Table:
    """A row for each contestant, torch first. Ratios are to torch, speedups are of the whole step."""
    n, torchs = benchmark.input_shape[0], benchmark.torchs
    columns = ("allocator peak", "ratio", "resident peak", "ratio", "step ms", "images/s", "speedup")
    printed = new_table(f"{benchmark.name}, batch {n}: one training step", ("convolutions",), columns)
    for one in (torchs, *benchmark.others):
        step = benchmark.step(one)
        if step is None:
            printed.add_row(_name(one.contestant), one.failure)
            continue
        printed.add_row(
            _name(one.contestant),
            *_peak(one.allocator_bytes, benchmark.allocator_ratio(one)),
            *_peak(one.resident_bytes, benchmark.resident_ratio(one)),
            milliseconds(step.time_s),
            images_per_s(n, step.time_s),
            "" if one is torchs else f"{ratio(step.speedup)} ± {step.uncertainty:.2f}",
        )
    return printed


def in_words(benchmark: MemoryBenchmark) -> str:
    """A line for each beside torch, and one that says what was counted."""
    lines = [_in_words(benchmark, one) for one in benchmark.others]
    counted = "allocator: on top of parameters, buffers and input"
    if benchmark.runs:
        counted += f"; resident: of a whole process, median of {benchmark.runs}"
    return "\n".join((*lines, counted))


def memory_record(benchmark: MemoryBenchmark) -> Record:
    """The object that ``mucudnn bench memory --json`` writes: all beside torch, each with torch's own numbers."""
    return {
        **record_header(benchmark.config, benchmark.environment, benchmark.date),
        "network": benchmark.name,
        "input_shape": benchmark.input_shape,
        "runs": benchmark.runs,
        "variants": [_record(benchmark, one) for one in benchmark.others],
    }


def _name(contestant: Contestant) -> str:
    bound = "" if contestant.config is None else f", {memory_bound(contestant.config)}"
    return f"{contestant.variant}{bound}"


def _in_words(benchmark: MemoryBenchmark, one: StepMemory) -> str:
    step, needed = benchmark.step(one), benchmark.allocator_ratio(one)
    if step is None or needed is None:
        return f"{_name(one.contestant)}: {one.failure}"
    return f"{_name(one.contestant)}: {needed:.3f} of torch's memory, {ratio(step.speedup)} as fast"


def _peak(size_bytes: int | None, to_torch: float | None) -> tuple[str, str]:
    """Cells of one peak; empty where it was not measured."""
    return ("", "") if size_bytes is None or to_torch is None else (format_bytes(size_bytes), f"{to_torch:.3f}")


def _record(benchmark: MemoryBenchmark, one: StepMemory) -> Record:
    """Keys of the contestant's own numbers begin with its name."""
    torchs, step, variant, config = benchmark.torchs, benchmark.step(one), one.contestant.variant, one.contestant.config
    own = variant.replace("-", "_")
    return {
        "variant": variant.value,
        "workspace_limit": None if config is None else config.workspace_limit,
        "workspace_budget": None if config is None else config.workspace_budget,
        "torch_allocator_bytes": torchs.allocator_bytes,
        f"{own}_allocator_bytes": one.allocator_bytes,
        "torch_resident_bytes": torchs.resident_bytes,
        f"{own}_resident_bytes": one.resident_bytes,
        "allocator_ratio": benchmark.allocator_ratio(one),
        "resident_ratio": benchmark.resident_ratio(one),
        "torch_step_s": median(torchs.samples_s),
        f"{own}_step_s": None if step is None else step.time_s,
        "speedup": None if step is None else step.speedup,
        "uncertainty": None if step is None else step.uncertainty,
        "rounds": None if step is None else step.rounds,
        "failure": one.failure,
    }
