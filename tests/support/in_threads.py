"""Benchmarks whose contestants run in threads of this process, not in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest

from mucudnn.bench.suites.shared import apart
from mucudnn.bench.suites.shared.apart import Ready
from mucudnn.bench.suites.shared.processes import WorkerError
from mucudnn.bench.suites.shared.timing import own_thread
from mucudnn.core.errors import first_line


class InThread:
    """A thread in place of the process of a contestant."""

    def __init__(self, job: Callable[[], Ready[Any]]) -> None:
        self.thread, self.job = own_thread("cpu"), job
        self.ready: Ready[Any] | None = None

    def ask(self, function: Callable[[Ready[Any]], Any], *_: object) -> Any:
        try:
            self.ready = self.ready or self.thread.submit(self.job).result()
            return self.thread.submit(function, self.ready).result()
        except Exception as error:
            raise WorkerError(first_line(error)) from error

    def __enter__(self) -> InThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.shutdown()


@contextmanager
def in_threads(suite: ModuleType) -> Iterator[None]:
    """Let the contestants of a suite run in threads, on the model itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "contestant", InThread)
        patch.setattr(suite, "pickled", lambda subject: nullcontext(lambda: subject))
        patch.setattr(apart, "PAUSE_S", 0.0)
        yield
