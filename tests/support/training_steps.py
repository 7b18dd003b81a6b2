"""Measured training steps of a tiny network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from support.clock.ticking import TickingClock
from support.in_threads import training_in_threads
from torch import nn
from torch.nn import functional as F

from mucudnn.bench.results.variants import Precision, Variant
from mucudnn.bench.results.writing import Row
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.training import Setting, TrainingOptions, measured_rows
from mucudnn.core.config import Config
from mucudnn.core.problem import MemoryFormat

CONFIG = Config(algorithms=("gemm",), time_limit="10ms", operations=("forward",))
FLOAT32: dict[str, Any] = {"precisions": [Precision.FLOAT32], "memory_formats": [MemoryFormat.CONTIGUOUS]}
SETTING = Setting("tiny", 2, "cpu", Precision.FLOAT32, MemoryFormat.CONTIGUOUS)


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
