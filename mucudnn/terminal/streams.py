"""Standard output and error of a command: that they fail, or lack characters, ends no command early."""

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

from mucudnn.words.errors import DATABASE_OPTION

# One sign for one, so that columns stay in line.
IN_ASCII = {"×": "x", "±": "~", "μ": "u", "µ": "u", "‖": "|", "…": ".", "→": ">", "▲": "^"}


def in_options(message: object) -> str:
    """Name the command line's options in a message of the package."""
    return str(message).replace(DATABASE_OPTION, "--database")


def show_warning(message: Warning | str, *where: object, **_: object) -> None:
    """Print the text of a warning, without its place in the code."""
    click.echo(f"Warning: {in_options(message)}", err=True)


class Guarded:
    """A standard stream that is written to until that fails: the rest goes nowhere, and the command goes on.

    fault: why it failed; characters that its encoding lacks are replaced by similar ones in ASCII.
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
            with suppress(UnsupportedOperation):  # or Python fails to write the rest of its buffer when it ends
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


@contextmanager
def guarded_streams() -> Iterator[Guarded]:
    """Guard standard output and error meanwhile; yields the guard of standard output.

    ``/dev/null`` takes the descriptors of closed ones. Otherwise a file that is opened later, such as the database,
    would get such a descriptor, and what libraries print would go into it.
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
