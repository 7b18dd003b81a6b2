"""Standard output and error, guarded so that write errors and missing characters do not end a command."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import Any

import click

from mucudnn.core.errors import DATABASE_OPTION

# One character each, so that columns stay aligned.
IN_ASCII = {"×": "x", "±": "~", "μ": "u", "µ": "u", "‖": "|", "…": ".", "→": ">", "▲": "^"}


def in_options(message: object) -> str:
    """Replace names of the Python interface in a message by command-line options."""
    return str(message).replace(DATABASE_OPTION, "--database")


def show_warning(message: Warning | str, *where: object, **_: object) -> None:
    """Print the text of a warning without its file and line."""
    click.echo(f"Warning: {in_options(message)}", err=True)


class Guarded:
    """A standard stream that discards all output after a write error, so that the command goes on.

    fault: the first write error, or None. Characters that the encoding lacks are replaced by similar ones in ASCII.
    """

    def __init__(self, stream: Any) -> None:
        self.fault: OSError | None = None
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="nearest")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except OSError as error:
            self.fault = self.fault or error
            with suppress(UnsupportedOperation):  # else Python fails at exit to flush its buffer
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextmanager
def guarded_streams() -> Iterator[Guarded]:
    """Guard standard output and error in the block; yield the guard of standard output.

    Closed descriptors are opened on ``/dev/null``. Otherwise a file that is opened later, such as the database, would
    get one of them, and libraries would print into it.
    """
    number = 0
    while number <= 2:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    before = sys.stdout, sys.stderr
    output, errors = (Guarded(stream or Path(os.devnull).open("w")) for stream in before)  # noqa: SIM115  # stays open
    sys.stdout, sys.stderr = output, errors
    try:
        yield output
    finally:
        output.flush()
        sys.stdout, sys.stderr = before


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start]
    written = IN_ASCII.get(lacking) or lacking.encode("ascii", "backslashreplace").decode()
    return written, error.start + 1


codecs.register_error("nearest", _nearest)
