"""Result of the memory benchmark: peaks of memory, and times of training steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from mucudnn.bench.contests.peak_memory import PeakComparison
from mucudnn.bench.timing.comparison import Comparison
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config


@dataclass(frozen=True, slots=True)
class MemoryVariant:
    """mucudnn with one bound on its workspaces, against torch. ``step``: seconds of a training step, in turns."""

    config: Config
    peaks: PeakComparison
    step: Comparison


@dataclass(frozen=True, slots=True)
class MemoryBenchmark:
    """Variants of mucudnn: the one that was asked for, then one with a plain limit for contrast."""

    name: str
    input_shape: tuple[int, ...]
    environment: Environment
    variants: tuple[MemoryVariant, ...]
    runs: int
    date: datetime = field(default_factory=lambda: datetime.now(UTC))
