"""Results of the inference benchmark: times of the whole model and of each convolution, and of other runtimes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf

from mucudnn.bench.contests.timing import MedianTime
from mucudnn.bench.suites.inference.runtime import Runtime
from mucudnn.running.environment import Environment
from mucudnn.running.filter_cache import CachedFilter
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.config import Config

MOST_DIFFERENCE = 1e-3  # of outputs in float32, above which a runtime has not computed the same


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


@dataclass(frozen=True, slots=True)
class RuntimeResult:
    """A runtime in a process of its own.

    difference: of its outputs from torch's, relative L2. ready_after_s: seconds until it was ready: started, exported,
    compiled or tuned. failure: why it has no time; ``None``: it has one. kinds_s: seconds of each kind of layer in a
    call that was watched; empty where that cannot be told.
    """

    runtime: Runtime
    version: str
    time: MedianTime | None = None
    difference: float | None = None
    ready_after_s: float | None = None
    failure: str | None = None
    kinds_s: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def computes_the_same(self) -> bool:
        """Whether it has a time, and its outputs are torch's but for the rounding of float32."""
        return self.time is not None and self.difference is not None and self.difference <= MOST_DIFFERENCE


@dataclass(frozen=True, slots=True)
class RuntimesComparison:
    """Calls of one model by several runtimes, torch's first. threads: of each runtime."""

    name: str
    input_shape: tuple[int, ...]
    config: Config
    environment: Environment
    threads: int
    runtimes: tuple[RuntimeResult, ...]
    rounds: int
    date: datetime = field(default_factory=lambda: datetime.now(UTC))

    def speedup(self, result: RuntimeResult) -> float | None:
        """Return the speedup over torch; ``None`` for a runtime that failed."""
        torchs = self.runtimes[0].time
        return None if result.time is None or torchs is None else torchs.time_s / result.time.time_s

    @property
    def best_other(self) -> RuntimeResult | None:
        """The fastest runtime that is not ours, of those that compute the same."""
        others = [one for one in self.runtimes if one.computes_the_same and not one.runtime.is_ours]
        return min(others, key=_time_s, default=None)

    @property
    def over_best_other(self) -> float | None:
        """The time of the fastest other runtime over ours; ``None`` where ours has none, or computes something else."""
        best = self.best_other
        ours = next((one for one in self.runtimes if one.runtime is Runtime.MUCUDNN and one.computes_the_same), None)
        return None if ours is None or best is None else _time_s(best) / _time_s(ours)


def _time_s(result: RuntimeResult) -> float:
    return inf if result.time is None else result.time.time_s
