"""Exceptions that mucudnn raises; each message says what was given, what is allowed and how to fix it."""

from __future__ import annotations

from collections.abc import Mapping

DATABASE_OPTION = "Config(database=...)"  # in messages; the command line replaces it by its option


class MucudnnError(Exception):
    """Base class of all errors that the caller can fix; the command line shows the message and exits with status 2."""


class InvalidInputError(MucudnnError, ValueError):
    """An invalid argument, such as a size, a layer, a name or an option."""


class InfeasibleError(MucudnnError):
    """No configuration (division into micro-batches, with algorithms) fits the workspace limit.

    ``smallest_feasible_bytes`` is the smallest limit within which a configuration fits, or None if no limit would help.
    """

    def __init__(self, message: str, smallest_feasible_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_feasible_bytes = smallest_feasible_bytes


class DatabaseError(MucudnnError):
    """A database of measurements that cannot be read or written; mucudnn never deletes the file."""


class OutputError(MucudnnError):
    """An output file that cannot be written, or that must not be overwritten."""


class UnavailableError(MucudnnError):
    """A device, data type or algorithm that is not available on this machine."""


class SharingError(MucudnnError):
    """Ranks that tune together differ in setup or choices, or a rank failed; the message names ranks and reasons.

    ``failures`` maps the number of each failed rank to its message; it is empty if no rank failed.
    """

    def __init__(self, message: str, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


class CapturingError(UnavailableError):
    """An algorithm's step would have to be built while a CUDA graph is captured, which is impossible."""


class MisalignedError(InvalidInputError):
    """Error due to operands, such as views, whose address lacks the alignment that an algorithm needs."""


class LibraryError(MucudnnError):
    """A failed call of a library that computes convolutions, or of a plan that the library built.

    Torch's own convolution then runs in place of the configuration that was tuned.
    """

    @property
    def is_lack_of_memory(self) -> bool:
        """Whether the library's call failed for lack of host or device memory, so that a later call may succeed."""
        return False


class BrokenDeviceError(MucudnnError):
    """A measured algorithm left the device unusable for this process. Later processes skip it."""


def first_line(error: BaseException) -> str:
    """Return the message without the stack traces that torch appends, or the error's type if the message is empty.

    >>> first_line(RuntimeError("out of memory\\nframe #0: ..."))
    'out of memory'
    >>> first_line(MemoryError())
    'MemoryError'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def no_images(where: str) -> InvalidInputError:
    """Return the error for a sample in which a convolution gets no images. where: the name of the convolution."""
    return InvalidInputError(
        f"sample_input has 0 images, so that {where or 'the model'} computes nothing: give one image or more"
    )
