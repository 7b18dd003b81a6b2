"""Warns of what a busy machine may have made too slow: once for a tuning, and once for many together."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration, MicroConfig

Doubtful = tuple[ConvProblem, MicroConfig | Configuration]


class BusyWarning(UserWarning):
    """Warning of doubtful measurements, and how to measure them again.

    doubtful: a configuration stands for its whole runs. worst: the largest share of the machine's speed that was
    missing.
    """

    def __init__(self, doubtful: Collection[Doubtful], worst: float) -> None:
        self.doubtful, self.worst = frozenset(doubtful), worst
        runs = sum(isinstance(of, Configuration) for _, of in self.doubtful)
        counts = [_counted(len(self.doubtful) - runs, "measurement"), _counted(runs, "whole run")]
        super().__init__(
            f"the machine was busy or slow: {' and '.join(filter(None, counts))} may be too slow (up to {worst:.0%} of "
            "its speed was missing): mucudnn database refresh measures them again when it is quiet"
        )


@contextmanager
def busy_told_once() -> Iterator[None]:
    """Let all tunings inside be warned of together, when the last of them has ended or one has failed."""
    found: list[BusyWarning] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", BusyWarning)
            show = warnings.showwarning

            def keep(message: Warning | str, *where: object, **more: object) -> None:
                if isinstance(message, BusyWarning):
                    found.append(message)
                else:
                    show(message, *where, **more)  # type: ignore[arg-type]

            warnings.showwarning = keep
            yield
    finally:
        if found:
            doubtful = frozenset[Doubtful]().union(*(one.doubtful for one in found))
            warnings.warn(BusyWarning(doubtful, max(one.worst for one in found)), stacklevel=2)


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}" if number else ""
