"""What work shows on a terminal: its progress, and a console for results.

Progress is a callback that gets a description of the current work and the completed fraction.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Event, Thread
from typing import TYPE_CHECKING

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.values import format_seconds, shown

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, float], None]

PIPED_WIDTH = 320  # columns of a table that goes to a file or another program; on CUDA tables are wide
LINE_EVERY_S = 10.0  # where standard error is not a terminal
_REFRESH_S = 0.1  # shortest time between redraws of the bar


def silent(text: str, fraction: float) -> None:
    """Show nothing: a progress callback for quiet work."""


def share_of(progress: Progress, start: float, share: float) -> Progress:
    """Return a progress callback for a part of the work that begins at fraction ``start`` and is ``share`` of all.

    >>> second_half = share_of(lambda text, fraction: print(text, fraction), 0.5, 0.5)
    >>> second_half("whole runs", 0.5)
    whole runs 0.75
    """
    return lambda text, fraction: progress(text, start + share * fraction)


@contextmanager
def progress_of(argument: Progress | bool | None) -> Iterator[Progress]:
    """Yield the progress callback for a user's argument.

    A callable is used as it is; None and True mean a bar if standard error is a terminal; False shows nothing. Raises
    ``InvalidInputError`` for anything else.
    """
    if argument is False:
        yield silent
    elif argument is None or argument is True:
        with progress_bar(lines=False) as progress:
            yield progress
    elif callable(argument):
        yield argument
    else:
        raise InvalidInputError(
            f"progress is {shown(argument)}; give a function of a text and a fraction, None for a bar on a terminal, "
            "or False for none"
        )


@contextmanager
def progress_bar(*, lines: bool = True) -> Iterator[Progress]:
    """Yield the callback of a progress bar on standard error that disappears when the work is done.

    If standard error is not a terminal, print a line every ten seconds instead, or nothing without ``lines``. Under
    torchrun only rank 0 shows progress.
    """
    stream = sys.stderr
    if stream is None or os.environ.get("RANK", "0") != "0":
        yield silent
    elif _is_terminal(stream):
        with _bar() as progress:
            yield progress
    else:
        with _lines() if lines else nullcontext(silent) as progress:
            yield progress


@contextmanager
def _bar() -> Iterator[Progress]:
    """Yield the callback of a progress bar, drawn only in the callback: a thread would disturb measurements."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        SpinnerColumn(),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    drawn_at = 0.0
    with Bar(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("starting", total=1.0)

        def progress(text: str, fraction: float) -> None:
            nonlocal drawn_at
            bar.update(task, description=text, completed=fraction)
            if time.monotonic() - drawn_at > _REFRESH_S:
                bar.refresh()
                drawn_at = time.monotonic()

        yield progress


@contextmanager
def _lines() -> Iterator[Progress]:
    """Yield a callback whose latest progress is printed at regular intervals, even if the work reports nothing new."""
    latest, started_at, ended = ("starting", 0.0), time.monotonic(), Event()

    def report(text: str, fraction: float) -> None:
        nonlocal latest
        latest = text, fraction

    def print_lines() -> None:
        while not ended.wait(LINE_EVERY_S):
            text, fraction = latest
            elapsed = format_seconds(time.monotonic() - started_at)
            with suppress(AttributeError, ValueError):  # standard error was closed or replaced
                print(f"{fraction:4.0%} after {elapsed}: {text}", file=sys.stderr, flush=True)  # noqa: T201

    printing = Thread(target=print_lines, daemon=True)
    printing.start()
    try:
        yield report
    finally:
        ended.set()
        printing.join()


def _is_terminal(stream: object) -> bool:
    """Return whether a stream is an open terminal; notebooks and services put streams that may lack the method."""
    with suppress(AttributeError, ValueError):  # ValueError: it is closed
        return bool(stream.isatty())  # type: ignore[attr-defined]
    return False


def output() -> Console:
    """Return a console on standard output; if that is not a terminal, the console is wide enough for every table."""
    from rich.console import Console

    return Console(width=None if _is_terminal(sys.stdout) else PIPED_WIDTH, highlight=False, markup=False, emoji=False)
