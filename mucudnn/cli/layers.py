"""``mucudnn layers``: the convolutions of a source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from mucudnn.cli.shared import options
from mucudnn.cli.shared.commands import FileCommand

if TYPE_CHECKING:
    from mucudnn.bench.sources.layers import LayerTable
    from mucudnn.core.tables import Table


@click.command(cls=FileCommand)
@options.source
def layers(source: str, **sizes: Any) -> None:
    """List the convolutions of SOURCE: a network, a table, a CSV file, package.module:factory or file.py:factory."""
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.core.terminal import output

    output().print(layers_table(load_source(source, **sizes)))


def layers_table(table: LayerTable) -> Table:
    """Return a printable table of the convolutions of a source, with their sizes."""
    from mucudnn.core.tables import new_table, short_name

    columns = ("N", "C×pixels", "K", "filter", "stride", "padding", "dilation", "groups", "count", "GFLOP")
    printed = new_table(f"{table.source}: {len(table.layers)} convolutions", ("layer",), columns)
    for layer in table.layers:
        problem = layer.problem
        printed.add_row(
            short_name(layer.names) + ", transposed" * layer.transposed,
            str(layer.batch_size),
            _by((problem.c, *problem.extent)),
            str(problem.k),
            _by(problem.window),
            _by(problem.stride),
            _by(problem.padding),
            _by(problem.dilation),
            str(problem.groups),
            str(layer.count),
            f"{problem.flops(layer.batch_size) / 1e9:.2f}",
        )
    return printed


def _by(sizes: Iterable[int]) -> str:
    return "×".join(map(str, sizes))
