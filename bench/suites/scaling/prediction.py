"""Predicts steps of data-parallel training on many ranks from measured steps of one device.

The step of a rank (a process with its own device) is its measured step at its local batch, and the part of the
all-reduces that the backward pass does not hide. Ranks are equal, and wait for each other only in the all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import numpy as np

from mucudnn.bench.suites.scaling.steps import Convolutions, MeasuredSteps
from mucudnn.solver.all_reduce import AllReduce, Link, all_reduce_s, volume
from mucudnn.solver.buckets import Gradient, best_cap, ddp_default
from mucudnn.solver.costs import FloatArray

ENOUGH = 0.8  # The device starves below this share of its best throughput.


class Scaling(StrEnum):
    """The way in which a batch grows with the number of ranks (processes, each with its own device).

    Strong scaling divides a fixed batch among more ranks; weak scaling keeps the batch of each rank.
    """

    STRONG = "strong"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class Device:
    """Times of training steps on one device, up to the local batch ``largest`` (samples on that device).

    Times are interpolated between the measured local batches. Beyond them they grow as from the least to the largest.
    """

    steps: MeasuredSteps
    largest: int

    def measured(self, which: Convolutions) -> dict[int, float]:
        """Return the seconds of the measured steps by local batch."""
        return {step.local_batch: step.step_s for step in self.steps.steps[which]}

    def step_s(self, which: Convolutions) -> FloatArray:
        """Return the predicted seconds of a step of one rank alone, by local batch; measured steps are reproduced."""
        sizes, times = (list(values) for values in zip(*self.measured(which).items(), strict=True))
        n = np.arange(self.largest + 1)
        growth = max((times[-1] - times[0]) / (sizes[-1] - sizes[0]), 0.0)
        result: FloatArray = np.interp(n, sizes, times) + growth * np.maximum(n - sizes[-1], 0)
        return result

    def is_extrapolated(self, n: int) -> bool:
        """Whether a local batch of ``n`` samples is larger than all measured ones."""
        return n > max(self.measured(Convolutions.TORCH))

    def starving_below(self, which: Convolutions) -> int:
        """Return the least local batch from which on the device reaches ``ENOUGH`` of its best measured throughput."""
        times, last = self.step_s(which), max(self.measured(which))
        throughput = [n / times[n] for n in range(1, last + 1)]
        starved = [n for n, reached in enumerate(throughput, 1) if reached < ENOUGH * max(throughput)]
        return max(starved, default=0) + 1

    def gradients(self, which: Convolutions, n: int) -> tuple[list[Gradient], float]:
        """Return a step's gradients in the order they become ready, and the seconds until the backward pass ends.

        The optimizer's update follows.
        """
        steps = self.steps.steps[which]
        sizes = [step.local_batch for step in steps]
        columns = zip(*((*step.ready, step.backward_end) for step in steps), strict=True)
        *ready, end = (float(np.interp(n, sizes, column) * self.step_s(which)[n]) for column in columns)
        return [Gradient(*pair) for pair in zip(self.steps.gradients, ready, strict=True)], end


@dataclass(frozen=True, slots=True)
class Point:
    """A predicted training step on a number of ranks, which is a row of the CSV file. Times are in seconds.

    compute_s: time without communication. exposed_s: the part of all-reduces that the backward pass does not hide, with
    DistributedDataParallel's default buckets. throughput: samples a second. efficiency: throughput per rank over that
    with the fewest ranks. sent_bytes: bytes that a rank sends in the all-reduces of a step. best_bucket_cap_mb: the
    best ``bucket_cap_mb``; best_cap_exposed_s: its exposed time.
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
    sent_bytes: float
    best_bucket_cap_mb: float
    best_cap_exposed_s: float


def predict(
    device: Device, link: Link, all_reduce: AllReduce, ranks: Sequence[int], *, batch: int, local_batch: int
) -> Iterator[Point]:
    """Predict strong scaling of ``batch`` samples, then weak scaling of ``local_batch`` samples per rank.

    ranks: numbers of ranks, ascending. Strong scaling uses the largest local batch of any rank, and skips numbers of
    ranks above ``batch``. The device's times must include all local batches.
    """
    shared = [(count, -(-batch // count), batch) for count in ranks if count <= batch]
    grown = [(count, local_batch, count * local_batch) for count in ranks]
    for scaling, sizes in ((Scaling.STRONG, shared), (Scaling.WEAK, grown)):
        for which in Convolutions:
            first_throughput = None
            for count, local, samples in sizes:
                gradients, backward_end_s = device.gradients(which, local)
                cost = partial(_message_s, all_reduce, count, link)
                default, best = ddp_default(gradients, cost), best_cap(gradients, cost)
                compute_s = float(device.step_s(which)[local])
                exposed_s = max(default.end_s - backward_end_s, 0.0)
                throughput = samples / (compute_s + exposed_s)
                first_throughput = first_throughput or throughput / count
                yield Point(
                    scaling=scaling,
                    convolutions=which,
                    ranks=count,
                    local_batch=local,
                    global_batch=samples,
                    is_extrapolated=device.is_extrapolated(local),
                    step_s=compute_s + exposed_s,
                    compute_s=compute_s,
                    exposed_s=exposed_s,
                    throughput=throughput,
                    efficiency=throughput / count / first_throughput,
                    sent_bytes=volume(all_reduce, count) * sum(device.steps.gradients),
                    best_bucket_cap_mb=(best.cap_bytes or 0) / 2**20,
                    best_cap_exposed_s=max(best.end_s - backward_end_s, 0.0),
                )


def _message_s(all_reduce: AllReduce, ranks: int, link: Link, size_bytes: int) -> float:
    return all_reduce_s(all_reduce, ranks, size_bytes, link)
