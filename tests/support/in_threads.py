"""Contestants in threads of this process, where tests see what they do: for what processes do, and tests are quick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from mucudnn.bench.suites import training
from mucudnn.bench.suites.shared import apart
from mucudnn.bench.suites.shared.apart import Ready
from mucudnn.bench.suites.shared.processes import WorkerError
from mucudnn.bench.suites.shared.timing import OwnThread
from mucudnn.core.errors import first_line


class InThread(OwnThread):
    """A thread in place of the process of a contestant."""

    job: Callable[[], Ready[Any]]
    ready: Ready[Any] | None = None

    def ask(self, function: Callable[[Ready[Any]], Any], *_: object) -> Any:
        try:
            self.ready = self.ready or self.call(self.job)
            return self.call(function, self.ready)
        except Exception as error:
            raise WorkerError(first_line(error)) from error


@contextmanager
def training_in_threads() -> Iterator[None]:
    """Let training steps of a benchmark run in threads, on the model itself."""

    def contestant(job: Callable[[], Ready[Any]]) -> InThread:
        thread = InThread()
        thread.job = job
        return thread

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "contestant", contestant)
        patch.setattr(training, "pickled", lambda subject: nullcontext(lambda: subject))
        patch.setattr(apart, "PAUSE_S", 0.0)
        yield
