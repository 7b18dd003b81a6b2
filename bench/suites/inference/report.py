"""Report of the inference benchmark: a table in milliseconds and MiB for people, a record for programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from rich.table import Table

from mucudnn.bench.report.records import Record, record_header
from mucudnn.bench.report.tables import milliseconds, new_table, ratio
from mucudnn.bench.suites.inference.result import InferenceBenchmark, LayerResult, Variants
from mucudnn.words.units import format_bytes

_COLUMNS: Mapping[str, Callable[[Variants], str]] = {
    "torch ms": lambda variants: milliseconds(variants.torch.time_s),
    "not kept ms": lambda variants: milliseconds(variants.not_kept.time_s),
    "kept ms": lambda variants: milliseconds(variants.kept.time_s),
    "± %": lambda variants: f"{variants.kept.noise:.0%}",
    "over torch": lambda variants: ratio(variants.speedup),
    "over not kept": lambda variants: ratio(variants.gain),
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
