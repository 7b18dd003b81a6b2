"""Where commands and demo print: tables to standard output, progress to standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

PIPED_WIDTH = 320  # columns that a table may have which goes to a file or another program: on CUDA there are many


def output() -> Console:
    """Standard output; wide enough for every table where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, only where that is a terminal; removed when it is done.

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
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, fraction: bar.update(task, description=text, completed=fraction)
