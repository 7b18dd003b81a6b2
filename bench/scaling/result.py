"""The result of a prediction: the steps of all numbers of ranks, and what they were made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mucudnn.bench.scaling.local_batches import Convolutions, local_batches
from mucudnn.bench.scaling.prediction import Cluster, Device, Point, Scaling, predict
from mucudnn.bench.scaling.steps import MeasuredSteps
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.running.environment import Environment
from mucudnn.words.config import Config


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """A prediction, and what it was made from."""

    source: str
    config: Config
    environment: Environment
    batch: int
    local_batch: int
    device: Device
    cluster: Cluster
    points: tuple[Point, ...]

    @property
    def is_link_measured(self) -> bool:
        """Whether the link is that of the process group on which steps were measured, too; else it was given."""
        return self.device.together is not None

    def of(self, scaling: Scaling, which: Convolutions) -> list[Point]:
        return [point for point in self.points if (point.scaling, point.convolutions) == (scaling, which)]

    def pairs(self, scaling: Scaling) -> list[tuple[Point, Point]]:
        """Return torch's and ours with the same ranks."""
        return [*zip(*(self.of(scaling, which) for which in Convolutions), strict=True)]


def predict_from(
    tuning: TableTuning,
    steps: tuple[MeasuredSteps, MeasuredSteps | None, MeasuredSteps | None],
    cluster: Cluster,
    ranks: Sequence[int],
    *,
    up_to: int,
    batch: int,
    local_batch: int,
) -> ScaleResult:
    """Predict as ``predict`` does, from a tuning at batch size ``up_to``.

    steps: of one rank alone, and beside the others, where they were measured; then those of one with our convolutions.

    Raises ``InvalidInputError`` as ``local_batches`` and ``Device``.
    """
    largest = max(up_to, local_batch, -(-batch // ranks[0]))
    device = Device(local_batches(tuning, up_to, largest), *steps)
    return ScaleResult(
        source=tuning.source,
        config=tuning.config,
        environment=tuning.environment,
        batch=batch,
        local_batch=local_batch,
        device=device,
        cluster=cluster,
        points=predict(device, cluster, ranks, batch=batch, local_batch=local_batch),
    )
