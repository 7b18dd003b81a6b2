"""Measured training steps of a tiny network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from support.clock.ticking import TickingClock
from support.in_threads import InThreads
from torch import nn

from mucudnn.bench.contests.variants import Variant
from mucudnn.bench.suites.training.benchmark import TrainingOptions, measure_training
from mucudnn.bench.suites.training.result import Precision, Setting, VariantResult
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat

CONFIG = Config(algorithms=("gemm",), time_limit="10ms", operations=("forward",))
FLOAT32: dict[str, Any] = {"precisions": [Precision.FLOAT32], "memory_formats": [MemoryFormat.CONTIGUOUS]}
SETTING = Setting("tiny", 2, "cpu", Precision.FLOAT32, MemoryFormat.CONTIGUOUS)


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 10))


def measured_variants(
    model: nn.Module | None = None, options: TrainingOptions | None = None, **given: Any
) -> list[VariantResult]:
    options = options or TrainingOptions(CONFIG, rounds=2, clock=TickingClock())
    options = replace(options, apart=InThreads, variants=options.variants or (Variant.TORCH, Variant.MUCUDNN))
    groups = measure_training("tiny", model or tiny(), (3, 6, 6), batch_size=2, options=options, **given)
    return [cell for group in groups for cell in group]
