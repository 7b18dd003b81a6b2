"""What is tuned: one operation of one layer, as it is called."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.problem import ConvProblem


@dataclass(frozen=True, slots=True)
class Task:
    """A problem with its mini-batch. ``limit_bytes``: the most workspace of its own, inclusive; None: no limit.

    ``count``: how often it occurs in the network. ``name``: what it is called in progress, errors and accounts.
    ``torch_fits``: torch's own convolution is within the limit, whatever it takes inside.
    """

    problem: ConvProblem
    batch_size: int
    limit_bytes: int | None = None
    count: int = 1
    name: str = ""
    torch_fits: bool = False

    def __str__(self) -> str:
        return self.name or str(self.problem)
