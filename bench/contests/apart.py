"""Keeps contestants apart: each has a process of its own, and a copy of what is handed over to all of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, Self, TypeVar

from mucudnn.bench.contests.own_process import OwnProcess, OwnProcessError, Ready
from mucudnn.measuring.timing.timer import EVERY_ROUND, Timer
from mucudnn.words.errors import UnavailableError, first_line

T = TypeVar("T")

PAUSE_S = 0.2  # before each sample: idle threads of the contestant that ran before it spin for a while
SAMPLED = replace(EVERY_ROUND, sample_s=0.25)  # short steps follow each other as in training: none is waited for


class Apart:
    """Processes of contestants, and the folder of what they are handed. A context manager: they end with it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder: Path | None = None
        self._handed = 0

    def handed(self, thing: T) -> Callable[[], T]:
        """Hand a thing over. Returns what gives a job its own copy. Raises ``UnavailableError`` as ``store``."""
        assert self._folder is not None
        self._handed += 1
        path = self._folder / f"{self._handed}.pickle"
        store(thing, path)
        return Stored(path)

    def start(self, job: Callable[[], Ready[T]]) -> OwnProcess[T]:
        """Wait until a job is ready, however long it takes. Raises ``OwnProcessError`` where it fails."""
        return self._stack.enter_context(OwnProcess(job, ready_s=inf, sample_s=inf, pause_s=PAUSE_S))

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(TemporaryDirectory()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass(slots=True, eq=False)
class Entrant(Generic[T]):
    """A contestant in a process of its own, with the timer of its turns; without both where it did not get ready."""

    process: OwnProcess[T] | None = None
    timer: Timer | None = None
    unready: str = ""

    @classmethod
    def started(cls, apart: Apart, job: Callable[[], Ready[T]]) -> Self:
        """Wait until a job is ready, or has failed."""
        try:
            process = apart.start(job)
        except OwnProcessError as error:
            return cls(unready=str(error))
        return cls(process, Timer(process.call, process, SAMPLED))

    @property
    def failure(self) -> str:
        """Say why nothing is known of it; empty: something is."""
        error = None if self.timer is None else self.timer.error
        return self.unready if error is None else first_line(error)


@dataclass(frozen=True, slots=True)
class Stored(Generic[T]):
    """File with what was stored. Called, it reads a copy."""

    path: Path

    def __call__(self) -> T:
        with self.path.open("rb") as stream:
            thing: T = pickle.load(stream)
        return thing


def store(thing: Any, path: Path) -> None:
    """Write a model, and what belongs to it, for processes. Raises ``UnavailableError`` where it cannot be pickled.

    Handed over by multiprocessing, the memory of its tensors would be shared.
    """
    try:
        with path.open("wb") as stream:
            pickle.dump(thing, stream)
    except Exception as error:  # a class may raise anything when it is pickled
        raise UnavailableError(
            "each contestant has a process of its own, for which the model cannot be pickled: make it picklable, such "
            f"as by functions with names instead of lambdas ({type(error).__name__}: {error})"
        ) from error
