"""Contestants in threads of this process, where tests see what they do: for what processes do, and tests are quick."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from mucudnn.bench.suites import training as training_benchmark
from mucudnn.bench.suites.shared.apart import Apart, OwnProcess, Ready
from mucudnn.bench.suites.shared.processes import OwnProcessError
from mucudnn.bench.suites.shared.timing import OwnThread
from mucudnn.core.errors import first_line

T = TypeVar("T")


def train_in_threads(monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> None:
    """Let the command that trains do so."""
    made = partial(training_benchmark.TrainingOptions, apart=partial(InThreads, device))
    monkeypatch.setattr(training_benchmark, "TrainingOptions", made)


class InThreads(Apart):
    """Gives each job a thread of its own, and nobody a copy. device: whose stream is that of the threads."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device

    def handed(self, thing: T) -> Callable[[], T]:
        return lambda: thing

    def start(self, job: Callable[[], Ready[T]]) -> OwnProcess[T]:
        return self._stack.enter_context(_InThread(job, self.device))


class _InThread(OwnProcess[T]):
    def __init__(self, job: Callable[[], Ready[T]], device: str) -> None:
        self._thread = OwnThread(device)
        self._ready = self._in_thread(job)
        self.found = self._ready.found

    def time(self, function: Callable[[], object], calls: int, calls_per_pass: int = 1) -> float:
        elapsed_s: float = self._in_thread(self._ready.time, calls)
        return elapsed_s

    def ask(self, calls: int) -> Any:
        assert self._ready.ask is not None
        return self._in_thread(self._ready.ask, calls)

    def end(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._thread)

    def _in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        try:
            return self._thread.call(function, *given)
        except Exception as error:
            raise OwnProcessError(first_line(error)) from error
