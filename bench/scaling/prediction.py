"""Predicts steps of data-parallel training on many ranks: convolutions, the rest of the step, and communication.

The step of a rank (a process with its own device) consists of its convolutions at its local batch, the measured rest of
the step, and the part of the all-reduces that the backward pass does not hide. Ranks are equal, and wait for each other
only in the all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from mucudnn.bench.analyses.batch_sizes import starving_below
from mucudnn.bench.scaling.local_batches import Convolutions, LocalBatches, along, local_batches
from mucudnn.bench.scaling.steps import MeasuredSteps
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.running.environment import Environment
from mucudnn.solver.all_reduce import all_reduce_s, lower_bound_s, volume
from mucudnn.solver.buckets import Buckets, Gradient, best_cap, best_merging, ddp_default
from mucudnn.solver.costs import FloatArray
from mucudnn.words.communication import AllReduce, Link
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError


class Scaling(StrEnum):
    """The way in which a batch grows with the number of ranks (processes, each with its own device).

    Strong scaling divides a fixed batch among more ranks; weak scaling keeps the batch of each rank.
    """

    STRONG = "strong"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The link between ranks (processes, each with its own device), and the algorithm of their all-reduces.

    overlaps: whether all-reduces overlap with the backward pass; if not, they start after it.
    """

    link: Link
    all_reduce: AllReduce
    overlaps: bool = True


@dataclass(frozen=True)
class Device:
    """Times of training steps on one device by local batch (samples on that device).

    convolutions: times in isolation; the times below extend to the largest of these local batches. steps: steps of the
    device alone, with torch's convolutions. together: steps of the same local batches while other ranks compute at the
    same time, or None. ours: steps of the device alone, with mucudnn's convolutions; if None, the ratio of a
    convolution's time in a step to its time in isolation is assumed to be the same as torch's.

    Raises ``InvalidInputError`` if a time of torch's own convolutions is unknown.
    """

    convolutions: LocalBatches
    steps: MeasuredSteps
    together: MeasuredSteps | None = None
    ours: MeasuredSteps | None = None

    def __post_init__(self) -> None:
        if not self._torch_s[1:].max() < float("inf"):
            raise InvalidInputError("PyTorch's own convolutions were not measured; tune them all, without a time limit")

    @property
    def _torch_s(self) -> FloatArray:
        return self.convolutions.times_s[Convolutions.TORCH]

    @cached_property
    def rest_s(self) -> FloatArray:
        """The seconds of a step outside of convolutions: torch's measured steps minus torch's convolutions."""
        left = {n: max(step_s - torch_s, 0.0) for n, step_s, torch_s in self._measured}
        return along(left, self.convolutions.largest)

    @cached_property
    def _in_step(self) -> dict[Convolutions, FloatArray]:
        """Ratios of the convolutions' time within a step to their time in isolation, by local batch.

        Torch's ratios are at most 1, because additional time counts as the rest. The ratios of mucudnn's convolutions
        are the measured steps minus the rest, over the time in isolation.
        """
        factors = {n: min(step_s / torch_s, 1.0) for n, step_s, torch_s in self._measured}
        torchs = np.interp(np.arange(self.convolutions.largest + 1), [*factors], [*factors.values()])
        if self.ours is None:
            return dict.fromkeys(Convolutions, torchs)
        sizes = [step.local_batch for step in self.ours.steps]
        left_s = np.maximum([step.step_s for step in self.ours.steps] - self.rest_s[sizes], 0.0)
        own = left_s / self.convolutions.times_s[Convolutions.MUCUDNN][sizes]
        return {
            Convolutions.TORCH: torchs,
            Convolutions.MUCUDNN: np.interp(np.arange(self.convolutions.largest + 1), sizes, own),
        }

    @property
    def _measured(self) -> list[tuple[int, float, float]]:
        """The measured steps: local batch, seconds of torch's step, and seconds of torch's convolutions alone."""
        return [(s.local_batch, s.step_s, float(self._torch_s[s.local_batch])) for s in self.steps.steps]

    def compute_s(self, which: Convolutions) -> FloatArray:
        """Return the predicted seconds of a step of one rank alone, by local batch; measured steps are reproduced.

        Batches larger than all measured ones take at least as long as the largest measured one.
        """
        step_s = self.convolutions.times_s[which] * self._in_step[which] + self.rest_s
        last = self.steps.steps[-1].local_batch
        step_s[last:] = np.maximum(step_s[last:], step_s[last])
        return step_s

    @cached_property
    def slowdown(self) -> FloatArray:
        """The ratio of a step's time while other ranks compute to the step's time alone, by local batch.

        Other ranks slow a step down if they share memory, caches or cores with it.
        """
        every = np.arange(self.convolutions.largest + 1)
        if self.together is None:
            return np.ones(every.size)
        pairs = zip(self.together.steps, self.steps.steps, strict=True)
        factors = [both.step_s / alone.step_s for both, alone in pairs]
        return np.interp(every, [step.local_batch for step in self.steps.steps], factors)

    def starving_below(self, which: Convolutions) -> int:
        """Return the smallest local batch that keeps the device busy, as ``batch_sizes.starving_below`` defines it."""
        return starving_below(dict(enumerate(self.compute_s(which)[1:].tolist(), 1)))

    def is_extrapolated(self, n: int) -> bool:
        """Whether a local batch of ``n`` samples is larger than all measured ones, so that times are extrapolated."""
        return n > max(self.convolutions.measured, default=0) or n > self.steps.steps[-1].local_batch

    def gradients(self, which: Convolutions, n: int) -> tuple[list[Gradient], float]:
        """Return a step's gradients in the order they become ready, and the seconds until the backward pass ends.

        The optimizer's update follows, and takes the same time with torch's convolutions as with mucudnn's.
        """
        ready, backward_end = self._parts[n]
        torchs_s, own_s = (float(self.compute_s(each)[n]) for each in (Convolutions.TORCH, which))
        backward_end_s = max(own_s - (1 - backward_end) * torchs_s, 0.0)
        moments = [part / backward_end * backward_end_s for part in ready]
        sizes = (size for _, size in self.steps.gradients)
        return [Gradient(*pair) for pair in zip(sizes, moments, strict=True)], backward_end_s

    @cached_property
    def _parts(self) -> list[tuple[list[float], float]]:
        """The fractions of a step at which each gradient is ready and the backward pass ends, by local batch."""
        largest = self.convolutions.largest
        rows = [(*step.ready, step.backward_end) for step in self.steps.steps]
        sizes = [step.local_batch for step in self.steps.steps]
        columns = [np.interp(range(largest + 1), sizes, column) for column in zip(*rows, strict=True)]
        return [(row[:-1], row[-1]) for row in np.array(columns).T.tolist()]


@dataclass(frozen=True, slots=True)
class Point:
    """A predicted training step on a number of ranks, which is a row of the CSV file. Times are in seconds.

    compute_s: time without communication. exposed_s: the part of all-reduces that the backward pass does not hide, with
    DistributedDataParallel's default buckets. throughput: samples a second. efficiency: throughput per rank over that
    with the fewest ranks. sent_bytes: bytes that a rank sends in the all-reduces of a step. communication: share of the
    step spent waiting for communication. all_reduces_s: total time of all-reduces. bound_s: lower bound of an
    all-reduce of all gradients. best_bucket_cap_mb: the best ``bucket_cap_mb``; best_cap_buckets, best_cap_exposed_s:
    its number of buckets and exposed time; merged_buckets, merged_exposed_s: the same for the best buckets of any
    sizes.
    """

    scaling: Scaling
    convolutions: Convolutions
    ranks: int
    local_batch: int
    global_batch: int
    is_extrapolated: bool
    step_s: float
    compute_s: float
    exposed_s: float
    throughput: float
    efficiency: float
    communication: float
    sent_bytes: float
    all_reduces_s: float
    bound_s: float
    default_buckets: int
    best_bucket_cap_mb: float
    best_cap_buckets: int
    best_cap_exposed_s: float
    merged_buckets: int
    merged_exposed_s: float


def predict(
    device: Device, cluster: Cluster, ranks: Sequence[int], *, batch: int, local_batch: int
) -> tuple[Point, ...]:
    """Predict strong scaling of ``batch`` samples, then weak scaling of ``local_batch`` samples per rank.

    ranks: numbers of ranks, ascending. Strong scaling uses the largest local batch of any rank, and skips numbers of
    ranks above ``batch``. The device's times must include all local batches.
    """
    shared = [(count, -(-batch // count), batch) for count in ranks if count <= batch]
    grown = [(count, local_batch, count * local_batch) for count in ranks]
    every = [(Scaling.STRONG, shared), (Scaling.WEAK, grown)]
    return tuple(
        point
        for scaling, sizes in every
        for which in Convolutions
        for point in _relative([_point(device, cluster, scaling, which, *size) for size in sizes])
    )


def _relative(points: Sequence[Point]) -> Iterator[Point]:
    for point in points:
        first = points[0]
        efficiency = (point.throughput / point.ranks) / (first.throughput / first.ranks)
        yield replace(point, efficiency=efficiency)


def _point(
    device: Device, cluster: Cluster, scaling: Scaling, which: Convolutions, ranks: int, local: int, batch: int
) -> Point:
    slowdown = float(device.slowdown[local]) if ranks > 1 else 1.0
    gradients, backward_end_s = device.gradients(which, local)
    backward_end_s *= slowdown
    gradients = [
        replace(gradient, ready_s=gradient.ready_s * slowdown if cluster.overlaps else backward_end_s)
        for gradient in gradients
    ]
    cost = partial(_message_s, cluster, ranks)
    default, by_cap, merged = (of(gradients, cost) for of in (ddp_default, best_cap, best_merging))
    exposed_s = [max(buckets.end_s - backward_end_s, 0.0) for buckets in (default, by_cap, merged)]
    compute_s = float(device.compute_s(which)[local]) * slowdown
    step_s = compute_s + exposed_s[0]
    return Point(
        scaling=scaling,
        convolutions=which,
        ranks=ranks,
        local_batch=local,
        global_batch=batch,
        is_extrapolated=device.is_extrapolated(local),
        step_s=step_s,
        compute_s=compute_s,
        exposed_s=exposed_s[0],
        throughput=batch / step_s,
        efficiency=1.0,
        communication=exposed_s[0] / step_s,
        sent_bytes=volume(cluster.all_reduce, ranks) * device.steps.size_bytes,
        all_reduces_s=sum(cost(size) for size in bucket_sizes(gradients, default)),
        bound_s=lower_bound_s(ranks, device.steps.size_bytes, cluster.link),
        default_buckets=len(default.ends),
        best_bucket_cap_mb=(by_cap.cap_bytes or 0) / 2**20,
        best_cap_buckets=len(by_cap.ends),
        best_cap_exposed_s=exposed_s[1],
        merged_buckets=len(merged.ends),
        merged_exposed_s=exposed_s[2],
    )


def bucket_sizes(gradients: Sequence[Gradient], buckets: Buckets) -> list[int]:
    """Return the bytes of each bucket, a group of gradients that is reduced together."""
    return [sum(g.size_bytes for g in gradients[first:last]) for first, last in pairwise([0, *buckets.ends])]


def _message_s(cluster: Cluster, ranks: int, size_bytes: int) -> float:
    return all_reduce_s(cluster.all_reduce, ranks, size_bytes, cluster.link)


@dataclass(frozen=True, slots=True)
class ScaleResult:
    """A prediction of data-parallel training, with the inputs from which it was made."""

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
        """Whether the link between ranks was measured, rather than given by the user."""
        return self.device.together is not None

    def of(self, scaling: Scaling, which: Convolutions) -> list[Point]:
        return [point for point in self.points if (point.scaling, point.convolutions) == (scaling, which)]

    def pairs(self, scaling: Scaling) -> list[tuple[Point, Point]]:
        """Return torch's and mucudnn's predicted step for each number of ranks, as pairs."""
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
    """Predict data-parallel training as ``predict`` does, from a tuning at batch size ``up_to``.

    steps: the fields ``steps``, ``together`` and ``ours`` of ``Device``. Raises the ``InvalidInputError`` of
    ``local_batches`` and ``Device``.
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
