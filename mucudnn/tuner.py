"""From convolutions to chosen configurations: measure what is not yet measured, solve, verify the choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from mucudnn.config import Config
from mucudnn.configuration import Configuration, Failure, Measurement
from mucudnn.environment import Environment
from mucudnn.problem import ConvProblem


@dataclass(frozen=True, slots=True)
class TunedProblem:
    """What was chosen for one problem, and why. Times are medians of whole runs, measured in turns with torch's."""

    problem: ConvProblem
    batch_size: int
    configuration: Configuration
    baseline_s: float
    time_s: float
    relative_error: float
    reason: str
    measurements: tuple[Measurement, ...] = ()
    failures: tuple[Failure, ...] = ()

    @property
    def speedup(self) -> float:
        return self.baseline_s / self.time_s


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of ``tune``: printable, and what ``mucudnn.Conv2d`` runs."""

    config: Config
    environment: Environment
    problems: tuple[TunedProblem, ...] = field(default=())


def tune(
    problems: Iterable[ConvProblem],
    batch_size: int,
    config: Config | None = None,
    *,
    device: str = "cpu",
    progress: Callable[[str, float], None] | None = None,
) -> Tuning:
    """Interface stub, replaced by the real thing."""
    raise NotImplementedError
