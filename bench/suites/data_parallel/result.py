"""Result of the benchmark of data-parallel training: what a step costs, and where its time goes."""

from __future__ import annotations

from dataclasses import dataclass, field

from mucudnn.bench.contests.step_split import StepSplit
from mucudnn.bench.scaling.local_batches import Convolutions
from mucudnn.running.environment import Environment
from mucudnn.words.communication import Communication
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting that all steps have in common.

    batch_size: samples of each rank in a step. device: ``cpu`` or ``cuda``. period: steps from one averaging of
    parameters to the next, where ``communication`` averages them.
    """

    source: str
    ranks: int
    batch_size: int
    device: str
    dtype: str
    memory_format: MemoryFormat
    communication: Communication
    period: int

    @property
    def global_batch(self) -> int:
        return self.ranks * self.batch_size


@dataclass(frozen=True, slots=True)
class Equality:
    """Comparisons of all ranks' parameters, bit by bit: how many there were, and in how many all were equal."""

    checked: int
    equal: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step: medians over the rounds, of the rank that was slowest in each.

    bucket_cap_mb: as of DistributedDataParallel; ``None``: its default. step_s, noise: with communication, and its IQR
    / median. alone_s: without any, on all ranks at the same time. split: of further steps without communication, whose
    convolutions are timed in place. bucket_bytes: gradients in each message, in the order in which they are sent.
    samples_s: with communication, one a round.
    """

    convolutions: Convolutions
    bucket_cap_mb: float | None
    step_s: float
    noise: float
    alone_s: float
    split: StepSplit
    bucket_bytes: tuple[int, ...]
    equality: Equality
    samples_s: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @property
    def exposed_s(self) -> float:
        """Seconds that a step takes longer for its communication, whatever the reason; noise can make it negative."""
        return self.step_s - self.alone_s


@dataclass(frozen=True, slots=True)
class DataParallelResult:
    """Steps of both convolutions with each bucket size, and where and how they were measured. threads: of each rank."""

    setting: Setting
    config: Config
    environment: Environment
    threads: int
    rounds: int
    steps: tuple[StepTimes, ...]

    def torchs(self, ours: StepTimes) -> StepTimes:
        """Return the steps of torch's convolutions with the same buckets."""
        wanted = Convolutions.TORCH, ours.bucket_cap_mb
        return next(step for step in self.steps if (step.convolutions, step.bucket_cap_mb) == wanted)
