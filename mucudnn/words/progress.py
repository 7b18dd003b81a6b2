"""Progress of long work: a callback that is told what is being done and the fraction that is done."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]


def silent(text: str, fraction: float) -> None:
    """Report to nobody."""


def share_of(progress: Progress, start: float, share: float) -> Progress:
    """Return the callback of one part of the work, which is ``share`` of the whole and begins at ``start``.

    >>> second_half = share_of(lambda text, fraction: print(text, fraction), 0.5, 0.5)
    >>> second_half("whole runs", 0.5)
    whole runs 0.75
    """
    return lambda text, fraction: progress(text, start + share * fraction)
