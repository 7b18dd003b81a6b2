"""Runs each contestant of a benchmark in its own process, with its own threads, allocator and copy of the model.

A contestant prepares once and then waits to be timed, interleaved with the others. If a contestant raises an error, is
killed or times out, the others are not affected.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, Generic, Self, TypeVar

from mucudnn.bench.suites.shared.processes import Failed, OwnProcessError, Worker, attempt
from mucudnn.core.errors import UnavailableError, first_line
from mucudnn.measuring.clocks import EVERY_ROUND, Clock, WallClock
from mucudnn.measuring.turns import Runner, Timer, here, in_turns

T = TypeVar("T")

PAUSE_S = 0.2  # Pause before each sample, because idle threads of the previous contestant keep spinning for a while.
SAMPLED = replace(EVERY_ROUND, sample_s=0.25)  # Many short steps per sample, back to back as in training.


@dataclass(frozen=True, slots=True)
class Ready(Generic[T]):
    """A function that has been prepared in a contestant's process, with everything needed to time it there.

    call: the function to time. found: picklable result of the preparation. runner: makes the calls. clock: times them.
    ask: makes a given number of additional calls and returns a picklable report on them.
    """

    call: Callable[[], object]
    found: T
    runner: Runner = here
    clock: Clock = field(default_factory=WallClock)
    ask: Callable[[int], Any] | None = None

    def time(self, calls: int) -> float:
        """Return the seconds taken by this many calls of the prepared function."""
        return self.runner(lambda: self.clock.time(self.call, calls))


class OwnProcess(Clock, Generic[T]):
    """A process that runs a job, which prepares a function, and then times calls of that function.

    Leaving the context manager ends the process. The object serves as the ``Clock`` of the calls and returns times that
    were measured inside the process. found: the result of the preparation.
    """

    def __init__(
        self, job: Callable[[], Ready[T]], *, ready_s: float = inf, sample_s: float = inf, pause_s: float = 0.0
    ) -> None:
        """Start a process that runs the picklable job, and wait until the job has prepared its function.

        ready_s, sample_s: timeouts of the preparation and of each timing, in seconds, after which the process is
        killed. pause_s: seconds to wait before each timing, until the threads of other processes are idle.

        Raises ``OwnProcessError`` if the job fails.
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
        """Return the seconds taken by this many calls of the job's function in its process; ``function`` is ignored.

        Raises ``OwnProcessError`` if a call fails, which also ends the process.
        """
        elapsed_s: float = self._send("time", calls)
        return elapsed_s

    def ask(self, calls: int) -> Any:
        """Make additional calls in the process, and return the job's report on them.

        Raises ``OwnProcessError`` if a call fails.
        """
        return self._send("ask", calls)

    def call(self) -> None:
        """Raise ``TypeError``. Timers require a function, but the calls are made by the process."""
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
    """Run a job in this process, and answer requests until the connection closes or a call of its function fails."""
    with redirect_stdout(sys.stderr):  # Standard output is reserved for the command, and libraries print to it.
        ready = attempt(job)
        told.send(ready if isinstance(ready, Failed) else ready.found)
        answer: Any = ready
        while not isinstance(answer, Failed):
            request, calls = told.recv()
            answer = attempt(partial(getattr(ready, request), calls))
            told.send(answer)


class Apart:
    """A context manager that ends the processes of contestants and deletes the temporary files of their inputs.

    ready_s, sample_s: timeouts in seconds of a contestant's preparation and of each of its samples. pause_s: seconds to
    wait before each sample.
    """

    def __init__(self, *, ready_s: float = inf, sample_s: float = inf, pause_s: float = PAUSE_S) -> None:
        self._limits = {"ready_s": ready_s, "sample_s": sample_s, "pause_s": pause_s}
        self._stack = ExitStack()
        self._folder: Path | None = None
        self._handed = 0

    def handed(self, thing: T) -> Callable[[], T]:
        """Store an object in a file and return a picklable function with which another process loads a copy of it.

        A file is used because tensors that multiprocessing sends to another process share their memory with this one.
        Raises ``UnavailableError`` if the object cannot be pickled.
        """
        assert self._folder is not None
        self._handed += 1
        path = self._folder / f"{self._handed}.pickle"
        try:
            with path.open("wb") as stream:
                pickle.dump(thing, stream)
        except Exception as error:  # Pickling a class can raise any exception.
            raise UnavailableError(
                "the model cannot be pickled, but each contestant runs in its own process: make it picklable, for "
                f"example by replacing lambdas with named functions ({type(error).__name__}: {error})"
            ) from error
        return partial(_load, path)

    def start(self, job: Callable[[], Ready[T]]) -> OwnProcess[T]:
        """Start a process for a job and wait until its function is prepared. Raises ``OwnProcessError`` if it fails."""
        return self._stack.enter_context(OwnProcess(job, **self._limits))

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(TemporaryDirectory()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _load(path: Path) -> Any:
    with path.open("rb") as stream:
        return pickle.load(stream)


@dataclass(slots=True, eq=False)
class Entrant(Generic[T]):
    """A contestant in its own process, with the timer of its calls.

    process, timer: None if the contestant's preparation failed. unready: the reason for that failure.
    """

    process: OwnProcess[T] | None = None
    timer: Timer | None = None
    unready: str | None = None

    @classmethod
    def started(cls, apart: Apart, job: Callable[[], Ready[T]]) -> Self:
        """Start a process for the job, and wait until its function is prepared or the preparation has failed."""
        try:
            process = apart.start(job)
        except OwnProcessError as error:
            return cls(unready=str(error))
        return cls(process, Timer(process.call, process, SAMPLED))

    @property
    def failure(self) -> str | None:
        """The reason why this contestant could not be prepared or timed, or None if it succeeded."""
        error = None if self.timer is None else self.timer.error
        return self.unready if error is None else first_line(error)

    @property
    def found(self) -> T | None:
        """The result of the preparation, or None if the contestant failed."""
        return None if self.process is None or self.failure else self.process.found

    @property
    def samples_s(self) -> list[float]:
        """The time samples in seconds; empty if the contestant failed."""
        return [] if self.timer is None or self.failure else self.timer.samples_s


def sampled(entrants: Iterable[Entrant[T]], rounds: int) -> Iterator[int]:
    """Time each contestant that is ready once per round; yield the number of completed rounds."""
    turns = in_turns([one.timer.sample for one in entrants if one.timer is not None])
    return (done for done, _ in zip(range(1, rounds + 1), turns, strict=False))


def require_torch(torchs: Entrant[T]) -> None:
    """Raise ``UnavailableError`` if the contestant that runs torch's convolutions failed."""
    if torchs.failure:
        raise UnavailableError(f"PyTorch, with which all others are compared, fails: {torchs.failure}")
