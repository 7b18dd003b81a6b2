"""Result of the memory benchmark: peaks of memory, and times of training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from mucudnn.bench.contests.variants import Variant
from mucudnn.measuring.timing.comparison import Comparison
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config


@dataclass(frozen=True, slots=True)
class Contestant:
    """A variant of the model; ours with one bound on its workspaces. config: ``None`` for torch's convolutions."""

    variant: Variant
    config: Config | None = None


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Peaks of a contestant's training step in bytes, and seconds of a step, one sample a round.

    allocator_bytes: on top of what is there before the step: parameters, buffers, input. resident_bytes: of the whole
    process, libraries included; ``None`` where it was not measured. failure: why nothing is known; empty: all is.
    """

    contestant: Contestant
    allocator_bytes: int | None = None
    resident_bytes: int | None = None
    samples_s: Sequence[float] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class MemoryBenchmark:
    """Training steps of torch, with which all are compared, and of the others in the order of ``Variant``.

    Ours with the bound that was asked for is followed by ours with a plain limit for contrast.
    """

    name: str
    input_shape: tuple[int, ...]
    environment: Environment
    config: Config
    torchs: StepMemory
    others: tuple[StepMemory, ...]
    runs: int
    date: datetime = field(default_factory=lambda: datetime.now(UTC))

    def allocator_ratio(self, one: StepMemory) -> float | None:
        """Return its peak to torch's: at most 1 if the step needs no more memory; ``None``: not measured."""
        return _ratio(one.allocator_bytes, self.torchs.allocator_bytes)

    def resident_ratio(self, one: StepMemory) -> float | None:
        """Return the same of resident memory."""
        return _ratio(one.resident_bytes, self.torchs.resident_bytes)

    def step(self, one: StepMemory) -> Comparison | None:
        """Compare its steps with torch's of the same rounds; ``None``: it has none."""
        return Comparison.of(self.torchs.samples_s, one.samples_s) if one.samples_s else None


def _ratio(size_bytes: int | None, torchs_bytes: int | None) -> float | None:
    return None if size_bytes is None or torchs_bytes is None else size_bytes / torchs_bytes
