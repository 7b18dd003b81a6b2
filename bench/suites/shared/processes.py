"""Supervised child processes, which call functions on request and end with their parent. Does not import torch."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from math import inf, isfinite
from multiprocessing.connection import Connection
from typing import Any

import psutil

from mucudnn.core.errors import MucudnnError, first_line
from mucudnn.core.values import format_seconds

_END_S = 2.0  # for a process to end itself


class WorkerError(RuntimeError):
    """Raised if a function raised an error in a child process, or the process ended early or timed out.

    trace: the traceback of the function's error, empty for mucudnn's own errors.
    moment_s: time of the function's error on the monotonic clock, which processes share; 0 if there was none.
    """

    def __init__(self, reason: str, trace: str = "", moment_s: float = 0.0) -> None:
        super().__init__(reason)
        self.trace, self.moment_s = trace, moment_s


class Worker(AbstractContextManager["Worker"]):
    """A child process that makes an object, and then calls functions with it on request, until one of them fails.

    Leaving the context ends the process.

    connection: has something to read when ``answer`` would not wait.
    """

    _context: Any = multiprocessing.get_context("spawn")

    def __init__(self, make: Callable[..., object], *arguments: Any) -> None:
        """Start a process that calls ``make`` with these arguments, all picklable, to make its object."""
        self.connection, there = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(there, make, *arguments), daemon=True)
        self._process.start()
        there.close()

    def ask(self, function: Callable[[Any], Any], limit_s: float = inf, name: str = "an answer") -> Any:
        """Return the result of the picklable function, called with the object in the process. Raises as ``answer``."""
        self.request(function)
        return self.answer(limit_s, name)

    def request(self, function: Callable[[Any], Any]) -> None:
        """Let the process call the picklable function with its object; ``answer`` returns the result."""
        with suppress(OSError):  # The process has ended, and ``answer`` says how.
            self.connection.send(function)

    def answer(self, limit_s: float = inf, name: str = "an answer") -> Any:
        """Wait for the result of a request and return it; kill the process after ``limit_s`` seconds.

        name: of the result in errors.

        Raises ``WorkerError`` if the object could not be made, if the function
        failed, on a timeout, and if the process has ended.
        """
        if not self.connection.poll(limit_s if isfinite(limit_s) else None):
            self._kill(self._started())
            raise WorkerError(f"{name} took longer than {format_seconds(limit_s)} and was killed")
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            raise WorkerError(how) from None
        if isinstance(answer, WorkerError):
            raise answer
        return answer

    def end(self) -> None:
        """End the process: it ends itself when it reads from the closed connection, and is killed if it does not."""
        started = self._started()  # while it lives: an ended process no longer tells them
        self.connection.close()
        self._kill(started, _END_S)

    def _started(self) -> list[psutil.Process]:
        """Return the processes that the process has started, none if it has ended."""
        started: list[psutil.Process] = []
        if self._process.is_alive():  # otherwise another process may have its number
            with suppress(psutil.NoSuchProcess):  # It has ended in this moment.
                started = psutil.Process(self._process.pid).children(recursive=True)
        return started

    def _kill(self, started: list[psutil.Process], grace_s: float = 0.0) -> None:
        """Kill the process, if it does not end within this time, and the processes that it has started."""
        self._process.join(grace_s)
        self._process.kill()
        self._process.join()
        for process in started:
            with suppress(psutil.Error):  # It has ended.
                process.kill()

    def __exit__(self, *_: object) -> None:
        self.end()


def _serve(connection: Connection, make: Callable[..., object], *arguments: Any) -> None:
    """Answer the parent's requests, then exit this process at once: leftover library threads can abort a normal exit.

    Semaphores and other resources that multiprocessing counts are freed first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends this process.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.showwarning = _show_warning
    failure = None
    try:
        served = make(*arguments)
        while True:
            try:
                function = connection.recv()
            except EOFError:  # The parent closed the connection.
                break
            connection.send(function(served))
    except MucudnnError as error:
        failure = WorkerError(str(error), moment_s=time.monotonic())
    except BaseException as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        failure = WorkerError(reason, traceback.format_exc(), time.monotonic())
    try:
        if failure is not None:
            connection.send(failure)
        sys.stdout.flush()
        sys.stderr.flush()
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    finally:
        os._exit(0 if failure is None else 1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _show_warning(message: Warning | str, *where: object, **_: object) -> None:
    """Print a warning without the file and line of code that raised it."""
    sys.stderr.write(f"Warning: {message}\n")
