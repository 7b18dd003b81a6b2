"""Report of the inference benchmark: tables in milliseconds and MiB for people, records for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from rich.table import Table

from mucudnn.bench.contests.kind_times import median_by_kind, shares
from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import images_per_s, milliseconds, new_table, ratio
from mucudnn.bench.suites.inference.result import (
    InferenceBenchmark,
    LayerResult,
    RuntimeResult,
    RuntimesComparison,
    Variants,
)
from mucudnn.words.units import format_bytes

_COLUMNS: Mapping[str, Callable[[Variants], str]] = {
    "torch ms": lambda variants: milliseconds(variants.torch.time_s),
    "not kept ms": lambda variants: milliseconds(variants.not_kept.time_s),
    "kept ms": lambda variants: milliseconds(variants.kept.time_s),
    "± %": lambda variants: f"{variants.kept.noise:.0%}",
    "over torch": lambda variants: ratio(variants.speedup),
    "over not kept": lambda variants: ratio(variants.gain),
}

_RUNTIME_COLUMNS: Mapping[str, Callable[[RuntimesComparison, RuntimeResult], str]] = {
    "ms": lambda result, one: "" if one.time is None else milliseconds(one.time.time_s),
    "images/s": lambda result, one: "" if one.time is None else images_per_s(result.input_shape[0], one.time.time_s),
    "± %": lambda result, one: "" if one.time is None else f"{one.time.noise:.0%}",
    "over torch": lambda result, one: "" if (speedup := result.speedup(one)) is None else ratio(speedup),
    "difference": lambda result, one: "" if one.difference is None else f"{one.difference:.1e}",
    "ready after s": lambda result, one: "" if one.ready_after_s is None else f"{one.ready_after_s:.1f}",
}


def inference_table(benchmark: InferenceBenchmark) -> Table:
    """Three times for each convolution, the speedups of cached filters, and their bytes; then the whole model."""
    footer = ("the whole model", "", *_cells(benchmark.whole), format_bytes(benchmark.kept_bytes))
    columns = (*_COLUMNS, "kept bytes")
    shape = "×".join(map(str, benchmark.input_shape))
    table = new_table(f"{benchmark.name}, inference of {shape}", ("layer", "configuration"), columns, footer)
    for layer in benchmark.layers:
        table.add_row(layer.name, _configurations(layer), *_cells(layer.variants), format_bytes(layer.kept_bytes))
    table.caption = (
        f"filters: {format_bytes(benchmark.filter_bytes)}; budget of what is kept of them: "
        f"{format_bytes(benchmark.config.cache_budget_bytes)}; ±: spread (IQR / median) of the times with kept filters"
    )
    return table


def inference_record(benchmark: InferenceBenchmark) -> Record:
    """The object that ``mucudnn bench inference --json`` writes. Seconds and bytes."""
    return {
        **record_header(benchmark.config, benchmark.environment, benchmark.date),
        "network": benchmark.name,
        "input_shape": list(benchmark.input_shape),
        "rounds": benchmark.rounds,
        "whole": _variants(benchmark.whole),
        "filter_bytes": benchmark.filter_bytes,
        "kept_bytes": benchmark.kept_bytes,
        "layers": [_layer(layer) for layer in benchmark.layers],
    }


def runtimes_table(comparison: RuntimesComparison) -> Table:
    """A row for each runtime; what has failed or computes something else is said below."""
    shape = "×".join(map(str, comparison.input_shape))
    threads = "1 thread" if comparison.threads == 1 else f"{comparison.threads} threads"
    title = f"{comparison.name}, inference of {shape}, {threads}: runtimes in turns"
    table = new_table(title, ("runtime", "version"), [*_RUNTIME_COLUMNS])
    for one in comparison.runtimes:
        table.add_row(one.runtime, one.version, *(cell(comparison, one) for cell in _RUNTIME_COLUMNS.values()))
    table.caption = "\n".join(_notes(comparison))
    return table


def runtime_kinds_table(comparison: RuntimesComparison) -> Table | None:
    """Shares of the kinds of layers in the time of a call; ``None``: they are not known of any runtime."""
    known = [one for one in comparison.runtimes if one.kinds_s]
    if not known:
        return None
    kinds = [*median_by_kind([one.kinds_s for one in known])]
    table = new_table(f"{comparison.name}: share of time by kind of layer, %", ("runtime",), kinds)
    for one in known:
        of = shares(one.kinds_s)
        table.add_row(one.runtime, *(f"{100 * of[kind]:.1f}" if kind in of else "" for kind in kinds))
    table.caption = "timed in place in calls of their own, where layers are not compiled"
    return table


def _notes(comparison: RuntimesComparison) -> Iterator[str]:
    best, over_best = comparison.best_other, comparison.over_best_other
    if best is not None and over_best is not None:
        fused = "fused" if comparison.config.fuse else "not fused"
        yield f"best of the others, {best.runtime} / mucudnn, {fused}: {ratio(over_best)}"
    yield "each in a process of its own; ±: spread (IQR / median); difference: of outputs from torch's, relative L2"
    for one in comparison.runtimes:
        if one.failure is not None:
            yield f"{one.runtime} has no time: {one.failure}"
        elif not one.computes_the_same:
            yield f"{one.runtime} does not compute what torch does: its time says nothing"


def runtimes_record(comparison: RuntimesComparison) -> Record:
    """The object that ``mucudnn bench inference --no-layers --json`` writes, and adds to the one of layers. Seconds."""
    return {
        **record_header(comparison.config, comparison.environment, comparison.date),
        "network": comparison.name,
        "input_shape": list(comparison.input_shape),
        "rounds": comparison.rounds,
        "threads": comparison.threads,
        "fused": comparison.config.fuse,
        "best_other_over_mucudnn": comparison.over_best_other,
        "runtimes": [_runtime(comparison, one) for one in comparison.runtimes],
    }


def _runtime(comparison: RuntimesComparison, one: RuntimeResult) -> Record:
    return {
        "runtime": one.runtime.value,
        "version": one.version,
        "time_s": None if one.time is None else one.time.time_s,
        "noise": None if one.time is None else one.time.noise,
        "speedup": comparison.speedup(one),
        "relative_difference": one.difference,
        "ready_after_s": one.ready_after_s,
        "failure": one.failure,
        "images_per_s": None if one.time is None else comparison.input_shape[0] / one.time.time_s,
        "kinds_s": dict(one.kinds_s),
    }


def _configurations(layer: LayerResult) -> str:
    """``gemm 1 → winograd-4x4 1``: the configurations without and with a cached filter."""
    not_kept = str(layer.tuned.configuration)
    if layer.kept is None:
        return not_kept
    return f"{not_kept} → {layer.kept.configurations[layer.tuned.batch_size]}"


def _cells(variants: Variants) -> list[str]:
    return [cell(variants) for cell in _COLUMNS.values()]


def _layer(layer: LayerResult) -> Record:
    kept = layer.kept
    return {
        "layer": layer.name,
        "problem": asdict(layer.tuned.problem),
        "batch_size": layer.tuned.batch_size,
        **_variants(layer.variants),
        "configuration": str(layer.tuned.configuration),
        "kept_configuration": None if kept is None else str(kept.configurations[layer.tuned.batch_size]),
        "kept_algorithm": None if kept is None else kept.algorithm,
        "filter_bytes": layer.filter_bytes,
        "kept_bytes": layer.kept_bytes,
    }


def _variants(variants: Variants) -> Record:
    cells = {"torch": variants.torch, "not_kept": variants.not_kept, "kept": variants.kept}
    times = {f"{name}_s": cell.time_s for name, cell in cells.items()}
    noises = {f"{name}_noise": cell.noise for name, cell in cells.items()}
    return {**times, **noises, "speedup": variants.speedup, "gain_over_not_kept": variants.gain}
