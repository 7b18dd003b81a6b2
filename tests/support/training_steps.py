"""Measured training steps of a tiny network, in threads of this process, where tests see what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from support.clock.machine import TickingClock
from torch import nn
from torch.nn import functional as F

from mucudnn.bench.results.variants import Precision, Variant
from mucudnn.bench.results.writing import Row
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites import training
from mucudnn.bench.suites.shared import apart
from mucudnn.bench.suites.shared.apart import Ready
from mucudnn.bench.suites.shared.processes import WorkerError
from mucudnn.bench.suites.shared.timing import OwnThread
from mucudnn.bench.suites.training import Setting, TrainingOptions, measured_rows
from mucudnn.core.config import Config
from mucudnn.core.errors import first_line
from mucudnn.core.problem import MemoryFormat

CONFIG = Config(algorithms=("gemm",), time_limit="10ms", operations=("forward",))
FLOAT32: dict[str, Any] = {"precisions": [Precision.FLOAT32], "memory_formats": [MemoryFormat.CONTIGUOUS]}
SETTING = Setting("tiny", 2, "cpu", Precision.FLOAT32, MemoryFormat.CONTIGUOUS)


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


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))


def measured_variants(
    model: nn.Module | None = None,
    options: TrainingOptions | None = None,
    precisions: Sequence[Precision] = (Precision.FLOAT32, Precision.BFLOAT16),
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
) -> list[Row]:
    options = options or TrainingOptions(CONFIG, rounds=2, clock=TickingClock())
    options = replace(options, variants=options.variants or (Variant.TORCH, Variant.MUCUDNN))
    (batch,) = labelled_batches(1, 2, (3, 6, 6))
    subject = (model or tiny(), batch, F.cross_entropy)
    settings = [Setting("tiny", 2, "cpu", *each, options.how) for each in product(precisions, memory_formats)]
    with training_in_threads():
        return [row for setting in settings for row in measured_rows(setting, subject, options)]
