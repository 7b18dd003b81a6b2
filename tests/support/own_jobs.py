"""Jobs for processes of their own: they get ready and answer, or fail in one of the ways in which libraries do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mucudnn.bench.suites.shared.apart import Ready
from mucudnn.core.errors import UnavailableError


def answering() -> Ready[str]:
    """Gets ready, and does nothing in a call."""
    return Ready(lambda: None, "ready")


def refusing() -> Ready[str]:
    raise UnavailableError("no such library")


def raising() -> Ready[str]:
    raise KeyError("an operator\nthat nobody knows")


def hanging() -> Ready[str]:
    time.sleep(600)
    return answering()


def raising_in_a_call() -> Ready[str]:
    return Ready(raising, "ready")


def killed_in_a_call() -> Ready[str]:
    return Ready(lambda: os.kill(os.getpid(), signal.SIGKILL), "ready")


def exiting_in_a_call() -> Ready[str]:
    return Ready(lambda: os._exit(7), "ready")


def hanging_in_a_call() -> Ready[str]:
    return Ready(lambda: time.sleep(600), "ready")


def starting_another() -> Ready[int]:
    return Ready(lambda: time.sleep(600), subprocess.Popen(["sleep", "600"]).pid)


def talking() -> Ready[str]:
    print("what a library says")  # noqa: T201
    return answering()


@dataclass(frozen=True)
class MadeUpRuntime:
    """A runtime that gives these outputs, and notes its calls in a file beside the model's.

    outputs: of each runtime; those that have none kill their process when they are called.
    """

    runtime: str
    subject: Any
    threads: int
    config: Any
    outputs: Mapping[str, Any]
    log: Path

    def __call__(self) -> Ready[Any]:
        self._note("ready")
        if self.runtime not in self.outputs:
            return Ready(killed_in_a_call().call, ([np.ones(2)], {}))
        return Ready(lambda: self._note("called"), ([np.array(self.outputs[self.runtime])], {}))

    def _note(self, what: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{self.runtime} {what} {os.getpid()} {self.threads}\n")
