"""Result of the solver benchmark: times of the solvers, each beside its bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from statistics import median
from typing import Self

from mucudnn.running.environment import Environment
from mucudnn.words.units import format_seconds


@dataclass(frozen=True, slots=True)
class SolverTime:
    """Median and slowest time of a solver, and the bar for the median. Seconds. samples_s: in their order."""

    what: str
    median_s: float
    slowest_s: float
    bar_s: float
    samples_s: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, what: str, samples_s: Sequence[float], bar_s: float) -> Self:
        return cls(what, median(samples_s), max(samples_s), bar_s, tuple(samples_s))

    def __str__(self) -> str:
        times = f"{format_seconds(self.median_s)}, slowest {format_seconds(self.slowest_s)}"
        return f"{self.what}: {times} (bar {format_seconds(self.bar_s)})"


@dataclass(frozen=True, slots=True)
class SolverBenchmark:
    """Times that can be printed. ``program``: the solver of divisions that the search alone does not get through."""

    rows: tuple[SolverTime, ...]
    program: str
    environment: Environment
    date: datetime

    def __str__(self) -> str:
        return "\n".join((*map(str, self.rows), f"{self.environment}, {self.program}"))
