"""Tuning tasks: one operation of one layer, with its batch size and workspace limit."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.core.problem import MOST_SAMPLES, ConvProblem
from mucudnn.core.results import MicroConfig
from mucudnn.core.torch_settings import TORCHS_OWN
from mucudnn.core.values import flag, instance, settle, text, whole


@dataclass(frozen=True, slots=True)
class Task:
    """A problem (one operation of a convolution) to tune, with batch size, workspace limit and number of occurrences.

    limit_bytes: largest workspace, inclusive; None if unlimited. count: number of occurrences in the network. name:
    text that is shown in progress, errors and accounts. in_headroom: whether the limit is the memory free below the
    peak of a training step; then torch's own convolution always fits by definition, and the workspace is allocated for
    each call. baseline_exempt: whether torch's own convolution may exceed the limit.

    Raises ``InvalidInputError`` for other values, for batches of more than ``MOST_SAMPLES``.
    """

    problem: ConvProblem
    batch_size: int
    limit_bytes: int | None = None
    count: int = 1
    name: str = ""
    in_headroom: bool = False
    baseline_exempt: bool = False

    def __post_init__(self) -> None:
        settle(
            self,
            problem=instance(ConvProblem, self.problem, "problem"),
            batch_size=whole(self.batch_size, "batch_size", 1, MOST_SAMPLES),
            limit_bytes=None if self.limit_bytes is None else whole(self.limit_bytes, "limit_bytes"),
            count=whole(self.count, "count", 1),
            name=text(self.name, "name"),
            in_headroom=flag(self.in_headroom, "in_headroom"),
            baseline_exempt=flag(self.baseline_exempt, "baseline_exempt"),
        )

    @property
    def baseline(self) -> MicroConfig:
        """Torch's own convolution with the undivided batch, to which configurations are compared."""
        return MicroConfig(TORCHS_OWN, self.batch_size)

    def __str__(self) -> str:
        return self.name or str(self.problem)
