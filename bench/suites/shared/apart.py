"""Runs each contestant of a benchmark in its own process, with its own threads, allocator and copy of the model.

A contestant prepares once and then waits to be timed, interleaved with the others. If a contestant raises an error, is
killed or times out, the others are not affected.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import inf
from operator import attrgetter, methodcaller
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, Generic, TypeVar

from mucudnn.bench.suites.shared.processes import Worker, WorkerError
from mucudnn.core.errors import UnavailableError
from mucudnn.measuring.clocks import Clock, StoppingRule, WallClock
from mucudnn.measuring.turns import Runner, Stop, Timer, here, in_turns

T = TypeVar("T")

PAUSE_S = 0.2  # Pause before each sample, because idle threads of the previous contestant keep spinning for a while.
# Short steps back to back, as in training; of tiny ones no more than needed, since on a busy machine each may wait.
SAMPLED = StoppingRule(sample_s=0.1, max_calls=25)


@dataclass(frozen=True, slots=True)
class Ready(Generic[T]):
    """A function that has been prepared in a contestant's process, with everything needed to time it there.

    call: the function to time.
    result: of the preparation; picklable.
    runner: makes the calls.
    clock: times them.
    ask: makes a given number of additional calls and returns a picklable report on them.
    """

    call: Callable[[], object]
    result: T
    runner: Runner = here
    clock: Clock = field(default_factory=WallClock)
    ask: Callable[[int], Any] | None = None

    def time(self, calls: int) -> float:
        """Return the seconds taken by this many calls of the prepared function."""
        return self.runner(lambda: self.clock.time(self.call, calls))


def contestant(job: Callable[[], Ready[T]]) -> Worker:
    """Start a process that runs the picklable job, for an ``Entrant``."""
    return Worker(_prepared, job)


def _prepared(job: Callable[[], Ready[T]]) -> Ready[T]:
    sys.stdout = sys.stderr  # Standard output is reserved for the command, and libraries print to it.
    return job()


class Entrant(WallClock, Generic[T]):
    """A contestant in its own process, with the timer of its calls, whose clock it is: the process times them.

    ready_after_s: the seconds that the preparation took.
    """

    def __init__(self, worker: Worker, *, ready_s: float = inf, sample_s: float = inf) -> None:
        """Wait until the contestant's function is prepared, or the preparation has failed.

        worker: as started by ``contestant``.
        ready_s: timeout of the preparation, after which the process is killed.
        sample_s: timeout of each sample.
        """
        self._worker, self._sample_s = worker, sample_s
        self.timer = Timer(lambda: None, self, SAMPLED)
        self._result: T | None = None
        begun_s = perf_counter()
        try:
            self._result = self._answer(attrgetter("result"), ready_s, "getting ready")
        except WorkerError as error:
            self.timer.error, self.timer.stop = error, Stop.FAILED
        self.ready_after_s = perf_counter() - begun_s

    @property
    def failure(self) -> str | None:
        """The reason why this contestant could not be prepared or timed, or None if it succeeded."""
        return None if self.timer.error is None else str(self.timer.error)

    @property
    def result(self) -> T | None:
        """The result of the preparation, or None if the contestant failed."""
        return None if self.failure else self._result

    @property
    def samples_s(self) -> list[float]:
        """The time samples in seconds; empty if the contestant failed."""
        return [] if self.failure else self.timer.samples_s

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        """Return the seconds taken by this many calls of the prepared function in its process; ignore ``function``.

        Raises ``WorkerError`` if a call fails, which also ends the process.
        """
        sleep(PAUSE_S)
        return float(self._answer(methodcaller("time", calls), self._sample_s, f"a sample of {calls} calls"))

    def ask(self, calls: int) -> Any:
        """Make additional calls in the process, at once after a sample, and return the job's report on them.

        Raises ``WorkerError`` if a call fails, which also ends the process.
        """
        return self._answer(methodcaller("ask", calls), self._sample_s, f"a sample of {calls} calls")

    def _answer(self, function: Callable[[Ready[T]], Any], limit_s: float, name: str) -> Any:
        try:
            return self._worker.ask(function, limit_s, name)
        except WorkerError as error:
            sys.stderr.write(error.trace)
            raise


@contextmanager
def pickled(thing: T) -> Iterator[Callable[[], T]]:
    """Store an object in a temporary file and yield a picklable function with which other processes load copies of it.

    A file is used because tensors that multiprocessing sends to another process share their memory with this one.
    Raises ``UnavailableError`` if the object cannot be pickled.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "thing.pickle"
        try:
            with path.open("wb") as stream:
                pickle.dump(thing, stream)
        except Exception as error:  # Pickling a class can raise any exception.
            raise UnavailableError(
                "the model cannot be pickled, but each contestant runs in its own process: make it picklable, for "
                f"example by replacing lambdas with named functions ({type(error).__name__}: {error})"
            ) from error
        yield partial(_load, path)


def _load(path: Path) -> Any:
    with path.open("rb") as stream:
        return pickle.load(stream)


def sampled(samples: Iterable[Callable[[], None]], rounds: int) -> Iterator[int]:
    """Take each sample, such as one of an entrant's timer, once per round; yield the number of completed rounds."""
    return (done for done, _ in zip(range(1, rounds + 1), in_turns([*samples]), strict=False))
