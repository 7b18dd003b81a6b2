"""What is tuned: one operation of one layer, as it is called."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.configuration import NATIVE, MicroConfig
from mucudnn.problem import ConvProblem


@dataclass(frozen=True, slots=True)
class Task:
    """A problem with its mini-batch. ``limit_bytes``: the most workspace of its own, inclusive; None: no limit.

    ``count``: how often it occurs in the network. ``name``: what it is called in progress, errors and accounts.
    ``in_headroom``: the limit is what is free below the peak of a training step: torch's own convolution, which makes
    the peak, is within it whatever it takes, and a workspace is there for one call only.
    """

    problem: ConvProblem
    batch_size: int
    limit_bytes: int | None = None
    count: int = 1
    name: str = ""
    in_headroom: bool = False

    @property
    def baseline(self) -> MicroConfig:
        """Torch's own convolution, undivided."""
        return MicroConfig(NATIVE, self.batch_size)

    def __str__(self) -> str:
        return self.name or str(self.problem)
