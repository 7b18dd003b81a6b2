"""Warnings that point to the user's line of code. They can be deferred, so that they interrupt no work as errors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_Given = tuple[Warning | str, type[Warning]]
_deferred: ContextVar[list[_Given] | None] = ContextVar("_deferred", default=None)
_said: set[str] = set()
_INTERNAL = ("mucudnn", "torch", "contextlib")  # packages whose lines are not the caller's


def warn(message: Warning | str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the user's line that called mucudnn, or at the end of the outermost ``warnings_deferred``."""
    deferred = _deferred.get()
    if deferred is None:
        warnings.warn(message, category, stacklevel=_level_of_caller())
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
        warnings.warn(message, category, stacklevel=_level_of_caller())


def _level_of_caller() -> int:
    """Return the ``stacklevel`` with which ``warnings.warn`` in the calling function points to the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        level, frame = level + 1, frame.f_back
    return level
