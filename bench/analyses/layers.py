"""Tells which convolutions a source has."""

from __future__ import annotations

from rich.table import Table

from mucudnn.bench.report.tables import new_table, short_name
from mucudnn.bench.sources.layers import Layer, LayerTable
from mucudnn.words.problem import Pair


def layers_table(table: LayerTable) -> Table:
    """The convolutions of a source, with their sizes."""
    columns = ("N", "C×H×W", "K", "filter", "stride", "padding", "dilation", "groups", "count", "GFLOP")
    printed = new_table(f"{table.source}: {len(table.layers)} convolutions", ("layer",), columns)
    for layer in table.layers:
        printed.add_row(*_layer_cells(layer))
    return printed


def _layer_cells(layer: Layer) -> tuple[str, ...]:
    problem = layer.problem
    return (
        short_name(layer.names) + ", transposed" * layer.transposed,
        str(layer.batch_size),
        f"{problem.c}×{problem.h}×{problem.w}",
        str(problem.k),
        _pair((problem.r, problem.s)),
        _pair(problem.stride),
        _pair(problem.padding),
        _pair(problem.dilation),
        str(problem.groups),
        str(layer.count),
        f"{problem.flops(layer.batch_size) / 1e9:.2f}",
    )


def _pair(value: Pair) -> str:
    return f"{value[0]}×{value[1]}"
