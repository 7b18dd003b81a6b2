"""Result of a comparison under workspace limits: whole runs of each problem, and their means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import geometric_mean

from mucudnn.bench.contests.names import TORCH
from mucudnn.bench.contests.timing import MedianTime
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.results import Configuration
from mucudnn.words.task import Task

WITHIN = 0.02  # a time longer by this fraction counts as the same
FLOOR_BYTES = 2**20  # the least that counts in a ratio of workspaces, which has no meaning at 0 bytes


@dataclass(frozen=True, slots=True)
class Run:
    """A configuration and its whole runs. ``configuration.time_s`` is the predicted time."""

    configuration: Configuration
    measured: MedianTime

    @property
    def time_s(self) -> float:
        return self.measured.time_s

    @property
    def workspace_bytes(self) -> int:
        return self.configuration.workspace_bytes


@dataclass(frozen=True, slots=True)
class UnderLimit:
    """One problem under one workspace limit, inclusive; ``None``: no limit.

    rival: the best undivided configuration within the limit. ours: the one that mucudnn chooses within it. Either is
    ``None`` where nothing is within the limit.
    """

    limit_bytes: int | None
    rival: Run | None
    ours: Run | None

    @property
    def gain(self) -> float | None:
        """Rival / ours, in time: above 1, ours is faster. ``None`` where one of them is missing."""
        return None if self.rival is None or self.ours is None else self.rival.time_s / self.ours.time_s


@dataclass(frozen=True, slots=True)
class SameTime:
    """The workspace that torch takes, and the least with which ours is as fast, or slower by ``WITHIN``.

    theirs_bytes: allocated while torch runs, beside its result. ours: ``None`` where nothing of ours was as fast.
    """

    theirs_bytes: int
    ours: Run | None

    @property
    def ratio(self) -> float | None:
        """Theirs / ours, each at least ``FLOOR_BYTES``: above 1, ours needs less."""
        if self.ours is None:
            return None
        return max(self.theirs_bytes, FLOOR_BYTES) / max(self.ours.workspace_bytes, FLOOR_BYTES)


@dataclass(frozen=True, slots=True)
class ComparedProblem:
    """One operation of one layer. torch: undivided, by the names of ``torch_variants``.

    under: by limit, the last one without a limit. same_time: against ``LimitsComparison.reference``.
    """

    task: Task
    torch: Mapping[str, MedianTime]
    under: tuple[UnderLimit, ...]
    same_time: SameTime

    def speedup_over(self, variant: str) -> float:
        """Speedup of our choice without a limit over one of torch's variants, undivided."""
        ours = self.under[-1].ours
        assert ours is not None  # without a limit torch's own is among the choices
        return self.torch[variant].time_s / ours.time_s


@dataclass(frozen=True, slots=True)
class FailedProblem:
    """A problem that could not be compared, with the reason in words."""

    task: Task
    reason: str


@dataclass(frozen=True, slots=True)
class LimitsComparison:
    """All problems that were reached, in their order; ``wanted`` is how many there are.

    limits: ascending, ``None`` (no limit) last. reference: the torch variant whose time and workspace count, that in
    benchmark mode where there is one. rivals: the word for the undivided ones.
    """

    source: str
    config: Config
    environment: Environment
    limits: tuple[int | None, ...]
    reference: str
    rivals: str
    wanted: int
    rounds: int
    problems: tuple[ComparedProblem, ...] = ()
    failed: tuple[FailedProblem, ...] = ()
    date: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def is_complete(self) -> bool:
        return len(self.problems) == self.wanted

    @property
    def torch_variants(self) -> tuple[str, ...]:
        return tuple(self.problems[0].torch) if self.problems else (TORCH,)

    def under(self, limit_bytes: int | None) -> list[UnderLimit]:
        """Results of every problem under this limit."""
        return list(self._under(limit_bytes))

    def gains(self, limit_bytes: int | None) -> list[float]:
        """Rival / ours of the problems that have both within the limit."""
        return [under.gain for under in self._under(limit_bytes) if under.gain is not None]

    @property
    def best_limit(self) -> int | None:
        """The limit with the largest mean gain; ``None`` where no limit has any."""
        means = {limit: mean(self.gains(limit)) for limit in self.limits if limit is not None}
        known = {limit: gain for limit, gain in means.items() if gain is not None}
        return max(known, key=lambda limit: known[limit], default=None)

    @property
    def workspace_ratios(self) -> list[float]:
        """Theirs / ours of the problems in which ours is as fast."""
        return [p.same_time.ratio for p in self.problems if p.same_time.ratio is not None]

    @property
    def speedups(self) -> list[float]:
        """Speedups of ours without a limit over the reference."""
        return [problem.speedup_over(self.reference) for problem in self.problems]

    def _under(self, limit_bytes: int | None) -> Iterator[UnderLimit]:
        return (problem.under[self.limits.index(limit_bytes)] for problem in self.problems)


def mean(ratios: Sequence[float]) -> float | None:
    """The geometric mean, in which a gain and an equal loss cancel; ``None`` without a ratio.

    >>> mean([2.0, 0.5])
    1.0
    """
    return geometric_mean(ratios) if ratios else None
