"""Tasks of tuning: one operation of one layer, as it is called."""

from __future__ import annotations

from dataclasses import dataclass

from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MOST_SAMPLES, ConvProblem, Operation
from mucudnn.words.results import MicroConfig, WithEpilogue, WithFreshWorkspace
from mucudnn.words.torch_settings import TORCHS_OWN
from mucudnn.words.values import flag, instance, settle, text, whole


@dataclass(frozen=True, slots=True)
class Task:
    """A problem with its mini-batch.

    limit_bytes: the most workspace of its own, inclusive; None: no limit. count: how often it occurs in the network.
    name: for progress, errors and accounts. in_headroom: the limit is what is free below the peak of a training step.
    Torch's own convolution, which makes the peak, is then within it whatever it takes, and a workspace is there for one
    call only. baseline_exempt: torch's own is within the limit whatever it takes, since it is not held to it.
    epilogue: what follows y in a fused convolution, and is part of its whole runs; ``None``: nothing.

    Raises ``InvalidInputError`` for other values, for batches of more than ``MOST_SAMPLES``, and for an epilogue of
    anything else than a forward operation in inference.
    """

    problem: ConvProblem
    batch_size: int
    limit_bytes: int | None = None
    count: int = 1
    name: str = ""
    in_headroom: bool = False
    baseline_exempt: bool = False
    epilogue: WithEpilogue | None = None

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
            epilogue=None if self.epilogue is None else instance(WithEpilogue, self.epilogue, "epilogue"),
        )
        if self.epilogue is not None and (self.in_headroom or self.problem.operation is not Operation.FORWARD):
            raise InvalidInputError(
                f"{self}: epilogue is '{self.epilogue}'; only a forward operation has one, and in inference: leave it "
                "out, or in_headroom"
            )

    @property
    def baseline(self) -> MicroConfig:
        """Torch's own convolution, undivided."""
        return MicroConfig(TORCHS_OWN, self.batch_size)

    @property
    def how(self) -> WithEpilogue | WithFreshWorkspace | None:
        """Way of its whole runs; ``None``: nothing is special in them."""
        return WithFreshWorkspace() if self.in_headroom else self.epilogue

    def __str__(self) -> str:
        return self.name or str(self.problem)
