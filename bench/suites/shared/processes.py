"""Runs functions in supervised child processes, which end with their parent. Does not import torch."""

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
from dataclasses import dataclass, field
from math import inf, isfinite
from multiprocessing.connection import Connection
from typing import Any, Self, TypeVar

from mucudnn.core.errors import MucudnnError, first_line
from mucudnn.core.values import format_seconds

T = TypeVar("T")

_END_S = 2.0  # for a process to end itself


class OwnProcessError(RuntimeError):
    """Raised if the function of a child process raised an error, or the process ended early or timed out."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A picklable description of an error that was raised in a child process.

    trace: the traceback, empty for mucudnn's own errors. moment_s: time of the error on the monotonic clock.
    """

    reason: str
    trace: str = ""
    moment_s: float = field(default_factory=time.monotonic)


def attempt(function: Callable[[], T]) -> T | Failed:
    """Call a function and return its result; if it raises an error, return a picklable ``Failed`` instead."""
    try:
        return function()
    except MucudnnError as error:
        return Failed(str(error))
    except Exception as error:
        return Failed(f"{type(error).__name__}: {first_line(error)}", traceback.format_exc())


class Worker:
    """A child process that calls a function, with a connection to it. Leaving the context ends the process."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        """Start a process that calls ``function`` with its end of the connection and the given arguments."""
        spawn = multiprocessing.get_context("spawn")
        self.told, there = spawn.Pipe()
        self.process = spawn.Process(target=_run, args=(function, there, *arguments), daemon=True)
        self.process.start()
        there.close()

    def send(self, message: object) -> None:
        """Send a picklable message to the process. Raises ``OwnProcessError`` if the process has ended."""
        try:
            self.told.send(message)
        except OSError:
            raise OwnProcessError(self.how_it_ended()) from None

    def receive(self, limit_s: float = inf, what: str = "an answer") -> Any:
        """Wait for a message from the process and return it; kill the process after ``limit_s`` seconds.

        what: the name of the message in errors. Raises ``OwnProcessError`` on a timeout, and if the process has ended.
        """
        if not self.told.poll(limit_s if isfinite(limit_s) else None):
            self.process.kill()
            raise OwnProcessError(f"{what} took longer than {format_seconds(limit_s)} and was killed")
        try:
            return self.told.recv()
        except (EOFError, ConnectionResetError):
            raise OwnProcessError(self.how_it_ended()) from None

    def how_it_ended(self) -> str:
        """Wait for the process to end, and describe how it ended, such as ``killed by SIGSEGV``."""
        self.process.join()
        code = self.process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"

    def end(self) -> None:
        """End the process: it ends itself when it reads from the closed connection, and is killed if it does not."""
        self.told.close()
        self.process.join(_END_S)
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _run(function: Callable[..., None], told: Connection, *arguments: Any) -> None:
    """Call a function, then exit this process at once, because leftover library threads can abort a normal exit.

    Semaphores and other resources that multiprocessing counts are freed first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent ends this process.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.showwarning = _show_warning
    status = 1
    try:
        function(told, *arguments)
        status = 0
    except (EOFError, KeyboardInterrupt):  # The parent closed the connection.
        pass
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
    finally:
        os._exit(status)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _show_warning(message: Warning | str, *where: object, **_: object) -> None:
    """Print a warning without the file and line of code that raised it."""
    sys.stderr.write(f"Warning: {message}\n")
