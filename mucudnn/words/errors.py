"""Errors that mucudnn raises on purpose: messages say what was given, what is allowed and what to do."""

from __future__ import annotations

from collections.abc import Mapping

DATABASE_OPTION = "Config(database=...)"  # in messages; the command line puts its own option there


class MucudnnError(Exception):
    """Base of all errors that the caller can mend; the command line shows the message and exits with 2."""


class InvalidInputError(MucudnnError, ValueError):
    """A value that is not allowed, such as a size, a layer, a name or an option."""


class InfeasibleError(MucudnnError):
    """No configuration fits the workspace limit.

    ``smallest_feasible_bytes`` is the smallest limit for which there is one, ``None`` if no limit would help.
    """

    def __init__(self, message: str, smallest_feasible_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_feasible_bytes = smallest_feasible_bytes


class DatabaseError(MucudnnError):
    """The measurements cannot be read or written; the file is never deleted."""


class OutputError(MucudnnError):
    """A file of results cannot be written, or must not be: what is there would be lost."""


class UnavailableError(MucudnnError):
    """A device, data type or algorithm that this machine does not have."""


class SharingError(MucudnnError):
    """Ranks that tune together are not alike, choose differently, or have lost one of them; names ranks and reasons.

    ``failures``: what each rank said that failed, by its number; empty where the reason is another one.
    """

    def __init__(self, message: str, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


class CapturingError(UnavailableError):
    """A step that is not built yet, while a CUDA graph is captured: then nothing can be built."""


class MisalignedError(InvalidInputError):
    """Operands that do not begin on a multiple of as many bytes as an algorithm needs, as views can."""


class LibraryError(MucudnnError):
    """A call of a library that computes convolutions failed, or what it made failed.

    An algorithm that raises it is replaced where it was tuned for; see ``Algorithm.alternatives``.
    """

    @property
    def is_lack_of_memory(self) -> bool:
        """Tell whether memory of the host or of the device could not be had; later it may."""
        return False


class BrokenDeviceError(MucudnnError):
    """A candidate left the device unusable for this process. That is stored, so that the next one passes over it."""


def first_line(error: BaseException) -> str:
    """Return what happened, without the stack traces that torch appends; the error's type where it says nothing.

    >>> first_line(RuntimeError("out of memory\\nframe #0: ..."))
    'out of memory'
    >>> first_line(MemoryError())
    'MemoryError'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]
