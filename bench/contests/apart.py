"""Keeps contestants apart: each has a process of its own, and a copy of what is handed over to all of them.

Its threads, its allocator and its failures are nobody else's. A contestant gets ready once, and then waits for its
turns. One that raises, is killed or takes too long is named, and ends alone.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, Generic, Self, TypeVar

from mucudnn.bench.contests.processes import Failed, OwnProcessError, Worker, attempt
from mucudnn.measuring.timing.timer import EVERY_ROUND, Clock, Runner, Timer, WallClock, here
from mucudnn.words.errors import UnavailableError, first_line

T = TypeVar("T")

PAUSE_S = 0.2  # before each sample: idle threads of the contestant that ran before it spin for a while
SAMPLED = replace(EVERY_ROUND, sample_s=0.25)  # short steps follow each other as in training: none is waited for


@dataclass(frozen=True, slots=True)
class Ready(Generic[T]):
    """Outcome of a job that is ready.

    call: what is timed. found: what the job has to tell, as it can be pickled. runner, clock: settings under which
    calls are made, and what times them. ask: makes so many further calls, and tells of them what can be pickled.
    """

    call: Callable[[], object]
    found: T
    runner: Runner = here
    clock: Clock = field(default_factory=WallClock)
    ask: Callable[[int], Any] | None = None

    def time(self, calls: int) -> float:
        """Return the seconds of so many calls."""
        return self.runner(lambda: self.clock.time(self.call, calls))


class OwnProcess(Clock, Generic[T]):
    """A process in which a job gets ready, and its calls are timed. A context manager: the process ends with it.

    It is the clock of those calls: they run there, where the time is read, too. found: what the job had to tell.
    """

    def __init__(
        self, job: Callable[[], Ready[T]], *, ready_s: float = inf, sample_s: float = inf, pause_s: float = 0.0
    ) -> None:
        """Start the job, which can be pickled, and wait until it is ready.

        ready_s, sample_s: most seconds until it is ready, and for a sample; the process is ended where it takes longer.
        pause_s: before each sample, for others to come to rest.

        Raises ``OwnProcessError`` where the job fails.
        """
        self._sample_s, self._pause_s = sample_s, pause_s
        self._worker = Worker(_serve, job)
        begun_s = self.now()
        try:
            self.found: T = self._answer(ready_s, "getting ready")
        except BaseException:
            self.end()
            raise
        self.ready_after_s = self.now() - begun_s

    def now(self) -> float:
        return perf_counter()

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        """Time as many calls of the job's in its process; the function stands for them, and is not called.

        Raises ``OwnProcessError`` where one fails; the process is at its end then.
        """
        elapsed_s: float = self._send("time", calls)
        return elapsed_s

    def ask(self, calls: int) -> Any:
        """Return what the job tells of so many further calls. Raises ``OwnProcessError`` as ``time`` does."""
        return self._send("ask", calls)

    def call(self) -> None:
        """Stand for the job's call where a timer wants a function. Raises ``TypeError``: it is not called here."""
        raise TypeError("the call of a process is timed by the process, which is its clock")

    def end(self) -> None:
        self._worker.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _send(self, request: str, calls: int) -> Any:
        sleep(self._pause_s)
        self._worker.send((request, calls))
        return self._answer(self._sample_s, f"a sample of {calls} calls")

    def _answer(self, limit_s: float, what: str) -> Any:
        answer = self._worker.receive(limit_s, what)
        if isinstance(answer, Failed):
            sys.stderr.write(answer.trace)
            raise OwnProcessError(answer.reason)
        return answer


def _serve(told: Connection, job: Callable[[], Ready[Any]]) -> None:
    """Get ready in a process of its own, and time calls until nobody asks, or one has failed."""
    with redirect_stdout(sys.stderr):  # libraries talk, and standard output is that of the command
        ready = attempt(job)
        told.send(ready if isinstance(ready, Failed) else ready.found)
        answer: Any = ready
        while not isinstance(answer, Failed):
            request, calls = told.recv()
            answer = attempt(partial(getattr(ready, request), calls))
            told.send(answer)


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
        return self._stack.enter_context(OwnProcess(job, pause_s=PAUSE_S))

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
