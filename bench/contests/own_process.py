"""Gives each contestant a process of its own: its threads, its allocator and its failures are nobody else's.

A contestant gets ready once, and then waits for its turns. One that raises, is killed or takes too long is named, and
ends alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from math import isfinite
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter, sleep
from typing import Any, Generic, Self, TypeVar

from mucudnn.bench.contests.child_process import end_with_parent, how_it_ended
from mucudnn.measuring.timing.timer import Clock, Runner, WallClock, here
from mucudnn.words.errors import MucudnnError, first_line
from mucudnn.words.units import format_seconds

T = TypeVar("T")

_END_S = 5.0


class OwnProcessError(RuntimeError):
    """A contestant in a process of its own has failed: what it raised, how it ended, or that it took too long."""


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

    def __init__(self, job: Callable[[], Ready[T]], *, ready_s: float, sample_s: float, pause_s: float = 0.0) -> None:
        """Start the job, which can be pickled, and wait until it is ready.

        ready_s, sample_s: most seconds until it is ready, and for a sample; the process is ended where it takes longer;
        infinite: it is waited for. pause_s: before each sample, for others to come to rest.

        Raises ``OwnProcessError`` where the job fails.
        """
        spawn = multiprocessing.get_context("spawn")
        self._told, there = spawn.Pipe()
        self._process: BaseProcess = spawn.Process(target=_work, args=(job, there), daemon=True)
        self._sample_s, self._pause_s = sample_s, pause_s
        self._process.start()
        there.close()
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
        self._process.terminate()
        self._process.join(_END_S)
        self._process.kill()
        self._process.join()
        self._told.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _send(self, request: str, calls: int) -> Any:
        sleep(self._pause_s)
        try:
            self._told.send((request, calls))
        except OSError:
            raise OwnProcessError(how_it_ended(self._process)) from None
        return self._answer(self._sample_s, f"a sample of {calls} calls")

    def _answer(self, limit_s: float, what: str) -> Any:
        if not self._told.poll(limit_s if isfinite(limit_s) else None):
            self._process.kill()
            raise OwnProcessError(f"{what} took longer than {format_seconds(limit_s)}, and was ended")
        try:
            answer = self._told.recv()
        except (EOFError, ConnectionResetError):
            raise OwnProcessError(how_it_ended(self._process)) from None
        if isinstance(answer, OwnProcessError):
            raise answer
        return answer


def _work(job: Callable[[], Ready[Any]], told: Connection) -> None:
    """Be the process: get ready, and time calls until nobody asks. Never returns, as threads may abort a usual end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who has started it ends it
    end_with_parent()
    warnings.showwarning = _show_warning
    try:
        with redirect_stdout(sys.stderr):  # libraries talk, and standard output is that of the command
            ready = job()
            told.send(ready.found)
            while True:
                request, calls = told.recv()
                told.send(getattr(ready, request)(calls))
    except EOFError:
        os._exit(0)
    except MucudnnError as error:
        told.send(OwnProcessError(str(error)))
    except Exception as error:
        traceback.print_exc()
        told.send(OwnProcessError(f"{type(error).__name__}: {first_line(error)}"))
    os._exit(1)


def _show_warning(message: Warning | str, *where: object, **_: object) -> None:
    """Say what a warning says, and not where in the code it is said."""
    sys.stderr.write(f"Warning: {message}\n")
