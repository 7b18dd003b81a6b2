"""Standard output and error of a command: that they cannot be written to, or lack characters, ends no command early."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

# One sign for one, so that columns stay in line.
_IN_ASCII = {"×": "x", "±": "~", "μ": "u", "µ": "u", "‖": "|", "…": ".", "→": ">", "▲": "^"}


def _nearest(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start]
    written = _IN_ASCII.get(lacking) or lacking.encode("ascii", "backslashreplace").decode()
    return written, error.start + 1


codecs.register_error("nearest", _nearest)


class Guarded(io.RawIOBase):
    """Writes to a stream until that fails; the rest goes nowhere. ``fault``: why."""

    def __init__(self, stream: BinaryIO) -> None:
        self.fault: OSError | None = None
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._try(lambda: self._stream.write(data))
        return len(data)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _try(self, do: Callable[[], object]) -> None:
        try:
            do()
        except OSError as error:
            self.fault = self.fault or error
            self._lead_nowhere()

    def _lead_nowhere(self) -> None:
        """Send the rest to nothing.

        What is still in a buffer would fail again when Python ends, with a traceback and status 120.
        """
        with suppress(io.UnsupportedOperation):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def guarded(name: str) -> Iterator[Guarded | None]:
    """Put ``sys.stdout`` or ``sys.stderr`` behind a guard meanwhile; yields ``None`` where there is no such stream."""
    stream = getattr(sys, name)
    if not hasattr(stream, "buffer"):  # it was closed, or is something of a notebook's
        yield None
        return
    guard = Guarded(stream.buffer)
    text = io.TextIOWrapper(
        guard,  # type: ignore[type-var]
        encoding=stream.encoding,
        errors="nearest",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    setattr(sys, name, text)
    try:
        yield guard
    finally:
        text.flush()
        text.detach()
        guard.close()  # or Python does when it collects the guard, and flushes a stream that may be closed by then
        setattr(sys, name, stream)


def occupy_closed() -> None:
    """Give the numbers of closed standard streams to nothing.

    A file that is opened later would get such a number, and what libraries print would go into it.
    """
    number = 0
    while number <= 2:
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)


def refusal_of_stdout() -> str | None:
    """Return the reason why nothing can be printed, as far as it is known before; ``None``: there is none."""
    if sys.stdout is None:
        return "it is closed"
    try:
        os.write(sys.stdout.fileno(), b"")  # /dev/full refuses even that
    except io.UnsupportedOperation:  # no real file: a test's, a notebook's
        return None
    except OSError as error:
        return error.strerror
    return None
