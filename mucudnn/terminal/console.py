"""The console on which commands print their tables."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_WIDTH = 320  # columns that a table may have which goes to a file or another program: on CUDA there are many


def output() -> Console:
    """Return standard output, wide enough for every table where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False)
