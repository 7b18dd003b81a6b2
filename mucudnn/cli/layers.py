"""``mucudnn layers``: the convolutions of a source."""

from __future__ import annotations

from typing import Any

import click

from mucudnn.bench.command_files import FileCommand
from mucudnn.cli import options


@click.command(cls=FileCommand)
@options.source
def layers(source: str, **sizes: Any) -> None:
    """List the convolutions of SOURCE: a network, a built-in table, a CSV file or package.module:factory."""
    from mucudnn.bench.console import output
    from mucudnn.bench.layers import load_source
    from mucudnn.bench.report import layers_table

    output().print(layers_table(load_source(source, **sizes)))
