"""Runs functions in processes of their own, which are watched and end with the one that starts them. Loads no torch."""

from __future__ import annotations

import multiprocessing
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

from mucudnn.words.errors import MucudnnError, first_line
from mucudnn.words.units import format_seconds

T = TypeVar("T")


class OwnProcessError(RuntimeError):
    """A process of its own has failed: what it raised, how it ended, or that it took too long."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure in another process. trace: empty for errors of ours. moment_s: by the clock that all processes have."""

    reason: str
    trace: str = ""
    moment_s: float = field(default_factory=time.monotonic)


def attempt(function: Callable[[], T]) -> T | Failed:
    """Return what the function returns, or how it failed, as it can be sent to another process."""
    try:
        return function()
    except MucudnnError as error:
        return Failed(str(error))
    except Exception as error:
        return Failed(f"{type(error).__name__}: {first_line(error)}", traceback.format_exc())


class Worker:
    """A fresh process that calls a function. A context manager: the process is killed at its end.

    told: the connection to the process.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        """Start the process. function: is called with the other end of the connection, then with the arguments."""
        spawn = multiprocessing.get_context("spawn")
        self.told, there = spawn.Pipe()
        self.process = spawn.Process(target=_run, args=(function, there, *arguments), daemon=True)
        self.process.start()
        there.close()

    def send(self, message: object) -> None:
        """Send what can be pickled. Raises ``OwnProcessError`` where the process has ended."""
        try:
            self.told.send(message)
        except OSError:
            raise OwnProcessError(self.how_it_ended()) from None

    def receive(self, limit_s: float = inf, what: str = "an answer") -> Any:
        """Wait for a message. what: is named where it takes longer than the limit, and the process is killed.

        Raises ``OwnProcessError`` then, and where the process has ended.
        """
        if not self.told.poll(limit_s if isfinite(limit_s) else None):
            self.process.kill()
            raise OwnProcessError(f"{what} took longer than {format_seconds(limit_s)}, and was ended")
        try:
            return self.told.recv()
        except (EOFError, ConnectionResetError):
            raise OwnProcessError(self.how_it_ended()) from None

    def how_it_ended(self) -> str:
        """Wait for the end of the process, and say what it was: ``killed by SIGSEGV``."""
        self.process.join()
        code = self.process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.told.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _run(function: Callable[..., None], told: Connection, *arguments: Any) -> None:
    """Be the process. Never returns: threads that libraries leave behind sometimes abort one that ends as usual."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started this one ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.showwarning = _show_warning
    status = 1
    try:
        function(told, *arguments)
        status = 0
    except (EOFError, KeyboardInterrupt):  # nobody asks any more
        pass
    except BaseException:
        traceback.print_exc()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _show_warning(message: Warning | str, *where: object, **_: object) -> None:
    """Say what a warning says, and not where in the code it is said."""
    sys.stderr.write(f"Warning: {message}\n")
