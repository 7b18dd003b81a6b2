"""Warnings that wait for the end of what they are about: where they are errors, they must not interrupt it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

_Given = tuple[Warning | str, type[Warning]]
_deferred: ContextVar[list[_Given] | None] = ContextVar("_deferred", default=None)
_said: set[str] = set()


def warn(message: Warning | str, category: type[Warning] = UserWarning, stacklevel: int = 1) -> None:
    """Issue a warning as ``warnings.warn`` does, or have it issued when the outermost ``warnings_deferred`` ends."""
    deferred = _deferred.get()
    if deferred is None:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    else:
        deferred.append((message, category))


def say_once(text: str) -> None:
    """Warn, unless this text was said before."""
    if text not in _said:
        _said.add(text)
        warn(text, RuntimeWarning, stacklevel=2)


@contextmanager
def warnings_deferred() -> Iterator[None]:
    """Issue this thread's warnings at the end.

    An error that ends the block is raised, also where warnings are errors.
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
        warnings.warn(message, category, stacklevel=5)  # the caller of a function that is decorated
