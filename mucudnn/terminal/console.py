"""The console to which commands print their tables."""

from __future__ import annotations

import sys

from rich.console import Console

PIPED_WIDTH = 320  # columns of a table that goes to a file or another program; on CUDA tables are wide


def output() -> Console:
    """Return a console on standard output; if that is not a terminal, the console is wide enough for every table."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False)
