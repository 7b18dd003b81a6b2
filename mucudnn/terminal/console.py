"""Prints for commands and the demo: tables to standard output, progress and errors to standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from mucudnn.words.progress import Progress

PIPED_WIDTH = 320  # columns that a table may have which goes to a file or another program: on CUDA there are many


def output() -> Console:
    """Return standard output, wide enough for every table where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a bar on standard error, only where that is a terminal; it goes when the work is done.

    Yields the callback that moves it: what is being done, and the fraction that is done.
    """
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, fraction: bar.update(task, description=text, completed=fraction)
