"""Result of the inference benchmark: times of the whole model and of each of its convolution modules."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from mucudnn.bench.contests.timing import MedianTime
from mucudnn.running.environment import Environment
from mucudnn.running.filter_cache import CachedFilter
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config


@dataclass(frozen=True, slots=True)
class Variants:
    """Times of the same computation with torch, and with mucudnn without and with cached filters."""

    torch: MedianTime
    not_kept: MedianTime
    kept: MedianTime

    @property
    def speedup(self) -> float:
        """Speedup of cached filters over torch."""
        return self.torch.time_s / self.kept.time_s

    @property
    def gain(self) -> float:
        """Speedup of cached filters over mucudnn without them."""
        return self.not_kept.time_s / self.kept.time_s


@dataclass(frozen=True, slots=True)
class LayerResult:
    """One convolution module. ``tuned``: what runs without a cached filter; ``kept``: ``None`` where none is cached."""

    name: str
    variants: Variants
    filter_bytes: int
    tuned: TunedProblem
    kept: CachedFilter | None

    @property
    def kept_bytes(self) -> int:
        return 0 if self.kept is None else self.kept.prepared_bytes


@dataclass(frozen=True, slots=True)
class InferenceBenchmark:
    """Times of the whole model, and of its convolutions alone. Sums over ``layers`` are those of the convolutions."""

    name: str
    input_shape: tuple[int, ...]
    config: Config
    environment: Environment
    whole: Variants
    layers: tuple[LayerResult, ...]
    rounds: int
    date: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def kept_bytes(self) -> int:
        return sum(layer.kept_bytes for layer in self.layers)

    @property
    def filter_bytes(self) -> int:
        """Bytes of the filters themselves."""
        return sum(layer.filter_bytes for layer in self.layers)
