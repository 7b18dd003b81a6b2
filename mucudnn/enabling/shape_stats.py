"""Notes what was met: problems with their batch sizes, how often, and what runs there and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

import torch

from mucudnn.running.choices import Choices
from mucudnn.tuning.result import TunedProblem
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration


class Origin(StrEnum):
    """Source of a choice."""

    MEASURED = "measured"
    DATABASE = "database"
    NEAREST = "nearest size"
    NONE = "not tuned"


@dataclass(slots=True, eq=False)
class ShapeStats:
    """One problem with its batch size on one device, with one number of threads.

    calls: how often it was met. ours: how often something else than torch's own has run. ask_at: the number of calls
    at which it is to be decided upon again; inf: it is decided. choices: what runs; None: torch's own. tuned: the
    result of tuning this very size. baseline_s, time_s: of one call, torch's and ours. was_looked_up: in the database.
    has_failed: an error has ended its tuning.
    """

    problem: ConvProblem
    batch_size: int
    device: torch.device
    threads: int
    calls: int = 0
    ours: int = 0
    ask_at: float = 1
    origin: Origin = Origin.NONE
    why: str = ""
    choices: Choices | None = None
    configuration: Configuration | None = None
    tuned: TunedProblem | None = None
    baseline_s: float | None = None
    time_s: float | None = None
    was_looked_up: bool = False
    has_failed: bool = False

    @property
    def layer(self) -> tuple[object, ...]:
        """All that sizes of one layer have in common: not the batch size, the height and the width."""
        p = self.problem
        geometry = (p.stride, p.padding, p.dilation, p.groups)
        kind = (p.operation, p.c, p.k, p.r, p.s, *geometry, p.dtype, p.memory_format)
        return *kind, self.device, self.threads

    def use(self, tuned: TunedProblem, origin: Origin) -> None:
        """Run what was chosen for this very size; nothing more is to be decided."""
        self.tuned, self.origin, self.why, self.ask_at = tuned, origin, tuned.reason, inf
        self.baseline_s, self.time_s = tuned.baseline_s, tuned.time_s
        self._run(tuned.configuration, tuned.limit_bytes)

    def use_nearest(self, configuration: Configuration, of: TunedProblem) -> None:
        """Run what was made of the choice for another size. Times are taken to grow with the arithmetic."""
        share = self.problem.flops(self.batch_size) / of.problem.flops(of.batch_size)
        self.origin = Origin.NEAREST
        self.why = f"as for {of.problem.h}x{of.problem.w}, batch {of.batch_size}"
        self.baseline_s = None if of.baseline_s is None else of.baseline_s * share
        self.time_s = of.time_s * share
        self._run(configuration, of.limit_bytes)

    def use_torchs_own(self, why: str) -> None:
        self.origin, self.why, self.choices, self.configuration = Origin.NONE, why, None, None
        self.baseline_s = self.time_s = None

    def _run(self, configuration: Configuration, limit_bytes: int | None) -> None:
        """Set what runs. Its executables are forgotten with it."""
        self.configuration = configuration
        chosen = {self.problem: {self.batch_size: configuration}}
        self.choices = None if configuration.is_baseline else Choices(chosen, self.device.type, True, limit_bytes)

    @property
    def gained_s(self) -> float:
        """Seconds that all calls of ours have saved, by what tuning has measured."""
        return 0.0 if self.baseline_s is None or self.time_s is None else self.ours * (self.baseline_s - self.time_s)
