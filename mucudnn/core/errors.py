"""Exceptions and warnings of mucudnn; each message says what was given, what is allowed and how to fix it.

Warnings point to the user's line of code. They can be deferred, so that they interrupt no work as errors.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import pairwise
from traceback import walk_tb

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


class UnsoundError(RuntimeError):
    """Error of a candidate that wrote outside its buffers or computed a wrong result."""


# Errors of algorithms that are measured. Torch reports out-of-memory as a RuntimeError, on the CPU and on a GPU.
CANDIDATE_ERRORS = (RuntimeError, MemoryError, LibraryError)


def raise_interruption(error: BaseException) -> None:
    """Raise the error that a signal handler of the program raised, if it is this one or caused it.

    Call it before an error of a type that others share is handled: like Ctrl-C, a timeout by ``signal.alarm`` ends the
    work that it meets. Python calls a handler from any line, and passes the frame of that line.
    """
    cause: BaseException | None = error
    while cause is not None:
        for (caller, _), (frame, _) in pairwise(walk_tb(cause.__traceback__)):
            called = inspect.getargvalues(frame)
            arguments = [called.locals.get(name) for name in called.args]
            arguments += called.locals.get(called.varargs or "", ())
            if any(value is caller for value in arguments):
                raise cause
        cause = cause.__cause__


@contextmanager
def tolerated(*types: type[Exception]) -> Iterator[None]:
    """End the block at an error of these types, but let those of signal handlers through."""
    try:
        yield
    except types as error:
        raise_interruption(error)


def without_frames(error: Exception) -> Exception:
    """Return the error as a result, without its traceback, whose frames would keep every tensor in them alive.

    Raises it if it is an interruption.
    """
    raise_interruption(error)
    return error.with_traceback(None)


def first_line(error: BaseException) -> str:
    """Return the message without the stack traces that torch appends, or the error's type if the message is empty.

    >>> first_line(RuntimeError("out of memory\\nframe #0: ..."))
    'out of memory'
    >>> first_line(MemoryError())
    'MemoryError'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def no_images(where: str) -> InvalidInputError:
    """Return the error for a sample in which a convolution gets no images.

    where: the name of the convolution.
    """
    return InvalidInputError(
        f"sample_input has 0 images, so that {where or 'the model'} computes nothing: give one image or more"
    )


_Given = tuple[Warning | str, type[Warning]]
_deferred: ContextVar[list[_Given] | None] = ContextVar("_deferred", default=None)
_said: set[str] = set()
_INTERNAL = ("mucudnn", "torch", "contextlib")  # packages whose lines are not the caller's


def warn(message: Warning | str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the user's line that called mucudnn, or at the end of the outermost ``warnings_deferred``."""
    deferred = _deferred.get()
    if deferred is None:
        _issue([(message, category)])
    else:
        deferred.append((message, category))


def say_once(text: str) -> None:
    """Issue a warning, but only once per process for the same text."""
    if text not in _said:
        _said.add(text)
        warn(text, RuntimeWarning)


@contextmanager
def warnings_deferred() -> Iterator[None]:
    """Defer this thread's warnings to the end of the block.

    An exception from the block is raised in any case, even if warnings are errors.
    """
    if _deferred.get() is not None:
        yield
        return
    deferred: list[_Given] = []
    token = _deferred.set(deferred)
    try:
        yield
    except BaseException:
        _deferred.reset(token)
        with suppress(Warning):
            _issue(deferred)
        raise
    _deferred.reset(token)
    _issue(deferred)


def _issue(deferred: Iterable[_Given]) -> None:
    for message, category in deferred:
        level = _level_of_caller()
        with tolerated(AttributeError, ValueError):  # standard error is closed, or no stream
            warnings.warn(message, category, stacklevel=level)


def _level_of_caller() -> int:
    """Return the ``stacklevel`` with which ``warnings.warn`` in the calling function points to the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        level, frame = level + 1, frame.f_back
    return level
