"""Result of the comparison: how far each variant's step is from float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

from mucudnn.running.environment import Environment
from mucudnn.words.config import Config
from mucudnn.words.problem import MemoryFormat


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Errors of one variant, relative, in the L2 norm, against the same step in float64.

    output: of all that the model gives. loss: of the loss. gradients: of all parameters' gradients together. worst: of
    the parameter with the largest error of its own, ``worst_parameter``. operations: number of those that were tuned;
    ours: of those that do not run torch's own.
    """

    variant: str
    memory_format: MemoryFormat
    output: float
    loss: float
    gradients: float
    worst: float
    worst_parameter: str
    operations: int
    ours: int


@dataclass(frozen=True, slots=True)
class StepErrorsBenchmark:
    """Errors of each variant, torch's own first in each memory format."""

    network: str
    batch_size: int
    config: Config
    environment: Environment
    rows: tuple[StepErrors, ...]
    date: datetime = field(default_factory=lambda: datetime.now(UTC))
