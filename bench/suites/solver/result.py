"""Result of the solver benchmark: times of the solvers, each beside its bar."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from mucudnn.running.environment import Environment
from mucudnn.words.units import format_seconds


@dataclass(frozen=True, slots=True)
class SolverTime:
    """Median and slowest time of a solver, and the bar for the median. Seconds."""

    what: str
    median_s: float
    slowest_s: float
    bar_s: float

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
