"""Prints for commands and the demo: tables to standard output, progress and errors to standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import click
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from mucudnn.words.progress import Progress
from mucudnn.words.units import format_seconds

PIPED_WIDTH = 320  # columns that a table may have which goes to a file or another program: on CUDA there are many
LINE_EVERY_S = 10.0  # without a terminal


def output() -> Console:
    """Return standard output, wide enough for every table where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, markup=False, emoji=False)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show progress on standard error: a bar on a terminal, else a line every ``LINE_EVERY_S`` seconds.

    Yields the callback that moves it: what is being done, and the fraction that is done. The bar is removed at the end.
    """
    console = Console(stderr=True)
    with _bar(console) if console.is_terminal else _lines() as progress:
        yield progress


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (
        SpinnerColumn(),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, fraction: bar.update(task, description=text, completed=fraction)


@contextmanager
def _lines() -> Iterator[Progress]:
    """Print the latest progress at regular intervals, also while the work reports nothing new."""
    latest, begun_s, ended = ("starting", 0.0), time.monotonic(), Event()

    def report(text: str, fraction: float) -> None:
        nonlocal latest
        latest = text, fraction

    def print_lines() -> None:
        while not ended.wait(LINE_EVERY_S):
            text, fraction = latest
            click.echo(f"{fraction:4.0%} after {format_seconds(time.monotonic() - begun_s)}: {text}", err=True)

    printing = Thread(target=print_lines, daemon=True)
    printing.start()
    try:
        yield report
    finally:
        ended.set()
        printing.join()
