"""``mucudnn layers``: the convolutions of a source."""

from __future__ import annotations

from typing import Any

import click

from mucudnn.cli.shared import options
from mucudnn.terminal.files import FileCommand


@click.command(cls=FileCommand)
@options.source
def layers(source: str, **sizes: Any) -> None:
    """List the convolutions of SOURCE: a network, a table, a CSV file, package.module:factory or file.py:factory."""
    from mucudnn.bench.analyses.layers import layers_table
    from mucudnn.bench.sources.layers import load_source
    from mucudnn.terminal.console import output

    output().print(layers_table(load_source(source, **sizes)))
