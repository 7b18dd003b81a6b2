"""Predicts steps of data-parallel training on many ranks from steps measured on one device.

Measured are steps with torch's convolutions and with mucudnn's, in turns, at several local batches (numbers of samples
on one device); an additional step reads the clock at every gradient. The step of a rank (a process with its own device)
is its measured step at its local batch, and the part of the all-reduces that the backward pass does not hide. Ranks are
equal, and wait for each other only in the all-reduces, whose models are in the package ``solver``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from statistics import median

import numpy as np
from torch import Tensor, nn

from mucudnn.bench.results.columns import Columns, table_of
from mucudnn.bench.results.variants import Variant, shown_name
from mucudnn.bench.sources.trainee import Batch, Loss, Trainee
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.tables import Table, milliseconds, ratio
from mucudnn.core.terminal import Progress, share_of, silent
from mucudnn.core.values import format_bytes
from mucudnn.measuring.clocks import Clock
from mucudnn.measuring.turns import in_turns
from mucudnn.solver.all_reduce import AllReduce, Gradient, Link, all_reduce_s, best_cap, ddp_default, rounds_and_volume

ENOUGH = 0.8  # The device starves below this share of its best throughput.
_TUNING = 0.9  # share of the progress bar
_FAR = "~"  # marks what is extrapolated

BOTH = (Variant.TORCH, Variant.MUCUDNN)  # the convolutions of a step: torch's own, or mucudnn's choices


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A measured training step.

    ready: fractions of it at which gradients are ready, ascending, in the order of ``MeasuredSteps.gradients``.
    backward_end: the fraction at which the backward pass ends.
    """

    local_batch: int
    step_s: float
    ready: tuple[float, ...]
    backward_end: float


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Measured training steps on one device by ascending local batch, and the bytes of each gradient.

    Times are interpolated between the measured local batches. Beyond them they grow as from the least to the largest.
    gradients: in the order in which they become ready.
    """

    gradients: tuple[int, ...]
    steps: Mapping[Variant, tuple[MeasuredStep, ...]]

    def step_s(self, variant: Variant, n: int) -> float:
        """Return the predicted seconds of a step of one rank alone at a local batch; measured steps are reproduced."""
        sizes = [step.local_batch for step in self.steps[variant]]
        times = [step.step_s for step in self.steps[variant]]
        growth = max((times[-1] - times[0]) / (sizes[-1] - sizes[0]), 0.0)
        return float(np.interp(n, sizes, times)) + growth * max(n - sizes[-1], 0)

    def largest(self) -> int:
        """Return the largest measured local batch."""
        return max(steps[-1].local_batch for steps in self.steps.values())

    def starving_below(self, variant: Variant) -> int:
        """Return the least local batch from which on the device reaches ``ENOUGH`` of its best measured throughput."""
        throughput = [n / self.step_s(variant, n) for n in range(1, self.largest() + 1)]
        starved = [n for n, reached in enumerate(throughput, 1) if reached < ENOUGH * max(throughput)]
        return max(starved, default=0) + 1

    def moments(self, variant: Variant, n: int) -> tuple[list[Gradient], float]:
        """Return a step's gradients in the order they become ready, and the seconds until the backward pass ends.

        The optimizer's update follows.
        """
        sizes = [step.local_batch for step in self.steps[variant]]
        columns = zip(*((*step.ready, step.backward_end) for step in self.steps[variant]), strict=True)
        step_s = self.step_s(variant, n)
        *ready, end = (float(np.interp(n, sizes, column)) * step_s for column in columns)
        return [Gradient(*pair) for pair in zip(self.gradients, ready, strict=True)], end


def measure_steps(
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    loss: Loss,
    local_batches: Sequence[int],
    tuned: Callable[[nn.Module, Tensor, Progress], nn.Module],
    clock: Clock,
    *,
    rounds: int = 5,
    progress: Progress = silent,
) -> MeasuredSteps:
    """Measure training steps of a model: forward pass, loss, backward pass, and gradient descent with momentum.

    batch_of: makes a batch of a number of samples.
    tuned: converts a copy of the model to mucudnn's convolutions for these images; where its step is slower, torch's
    counts, which ``optimize`` would restore.
    rounds: number of rounds over both kinds of convolutions at each local batch, after a warm-up round. The learning
    rate is 0, so that parameters do not change.

    Raises ``InvalidInputError`` if no parameter of the model gets a gradient.
    """
    steps: dict[Variant, list[MeasuredStep]] = {variant: [] for variant in BOTH}
    order: list[str] = []
    share = 1 / len(local_batches)
    for index, n in enumerate(sorted(local_batches, reverse=True)):
        batch = batch_of(n)
        ours = tuned(deepcopy(model), batch[0], share_of(progress, index * share, _TUNING * share))
        # Time the steps of both.
        trainees = [Trainee(network, learning_rate=0.0, loss=loss) for network in (model, ours)]
        turns = in_turns([partial(clock.time, partial(trainee.step, *batch), 1) for trainee in trainees])
        samples_s = []
        for number in range(rounds + 1):
            progress(f"steps of {n} samples", (index + _TUNING + (1 - _TUNING) * number / (rounds + 1)) * share)
            samples_s.append(next(turns))
        times_s = [median(column_s) for column_s in zip(*samples_s[1:], strict=True)]
        # When gradients are ready.
        moments = [gradient_moments(trainee, batch, clock) for trainee in trainees]
        order = order or sorted(moments[0][0], key=moments[0][0].__getitem__)
        for variant, place in ((Variant.TORCH, 0), (Variant.MUCUDNN, int(times_s[1] < times_s[0]))):
            ready, end = moments[place]
            parts = np.minimum(np.maximum.accumulate([ready[name] for name in order]), end).tolist()
            steps[variant].insert(0, MeasuredStep(n, times_s[place], tuple(parts), end))
    if not order:
        raise InvalidInputError("no parameter of the model gets a gradient, so there is nothing to reduce")
    parameters = dict(model.named_parameters())
    return MeasuredSteps(
        gradients=tuple(parameters[name].nbytes for name in order),
        steps={variant: tuple(measured) for variant, measured in steps.items()},
    )


def gradient_moments(trainee: Trainee, batch: Batch, clock: Clock) -> tuple[dict[str, float], float]:
    """Run a step; return the fractions of it at which each gradient was ready and the backward pass ended."""
    moments: dict[str, float] = {}

    def note(name: str, *_: object) -> None:
        moments[name] = clock.now()

    with ExitStack() as hooks:
        for name, parameter in trainee.model.named_parameters():
            if parameter.requires_grad:
                hook = partial(note, name)
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        hooks.enter_context(trainee.optimizer.register_step_pre_hook(partial(note, "")))
        begun_s = clock.now()
        trainee.step(*batch)
        elapsed_s = clock.now() - begun_s
    fractions = {name: (moment - begun_s) / elapsed_s for name, moment in moments.items()}
    backward_end = fractions.pop("")
    return fractions, backward_end


class Scaling(StrEnum):
    """The way in which a batch grows with the number of ranks (processes, each with its own device).

    Strong scaling divides a fixed batch among more ranks; weak scaling keeps the batch of each rank.
    """

    STRONG = "strong"
    WEAK = "weak"


@dataclass(frozen=True, slots=True)
class Point:
    """A predicted training step on a number of ranks, which is a row of the CSV file. Times are in seconds.

    compute_s: time without communication.
    exposed_s: the part of all-reduces that the backward pass does not hide, with DistributedDataParallel's default
    buckets.
    throughput: samples a second.
    efficiency: throughput per rank over that with the fewest ranks.
    sent_bytes: bytes that a rank sends in the all-reduces of a step.
    best_bucket_cap_mb: the best ``bucket_cap_mb``.
    best_cap_exposed_s: its exposed time.
    """

    scaling: Scaling
    convolutions: Variant
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
    measured: MeasuredSteps, link: Link, all_reduce: AllReduce, ranks: Sequence[int], *, batch: int, local_batch: int
) -> Iterator[Point]:
    """Predict strong scaling of ``batch`` samples, then weak scaling of ``local_batch`` samples per rank.

    ranks: numbers of ranks, ascending. Strong scaling uses the largest local batch of any rank, and skips numbers of
    ranks above ``batch``. The device's times must include all local batches.
    """
    shared = [(count, -(-batch // count), batch) for count in ranks if count <= batch]
    grown = [(count, local_batch, count * local_batch) for count in ranks]
    for scaling, sizes in ((Scaling.STRONG, shared), (Scaling.WEAK, grown)):
        for variant in BOTH:
            first_throughput = None
            for count, local, samples in sizes:
                gradients, backward_end_s = measured.moments(variant, local)
                cost = partial(all_reduce_s, all_reduce, count, link=link)
                default, best = ddp_default(gradients, cost), best_cap(gradients, cost)
                compute_s = measured.step_s(variant, local)
                exposed_s = max(default.end_s - backward_end_s, 0.0)
                throughput = samples / (compute_s + exposed_s)
                first_throughput = first_throughput or throughput / count
                yield Point(
                    scaling=scaling,
                    convolutions=variant,
                    ranks=count,
                    local_batch=local,
                    global_batch=samples,
                    is_extrapolated=local > measured.largest(),
                    step_s=compute_s + exposed_s,
                    compute_s=compute_s,
                    exposed_s=exposed_s,
                    throughput=throughput,
                    efficiency=throughput / count / first_throughput,
                    sent_bytes=rounds_and_volume(all_reduce, count)[1] * sum(measured.gradients),
                    best_bucket_cap_mb=(best.cap_bytes or 0) / 2**20,
                    best_cap_exposed_s=max(best.end_s - backward_end_s, 0.0),
                )


# Points of mucudnn's convolutions, each with the step with torch's; ranks alone do not communicate.
_LEFT: Columns[tuple[Point, float]] = {"scaling": lambda row: row[0].scaling.value}
_RIGHT: Columns[tuple[Point, float]] = {
    "ranks": lambda row: str(row[0].ranks),
    "local batch": lambda row: f"{_FAR if row[0].is_extrapolated else ''}{row[0].local_batch}",
    "PyTorch ms": lambda row: milliseconds(row[1]),
    "mucudnn ms": lambda row: milliseconds(row[0].step_s),
    "speedup": lambda row: ratio(row[1] / row[0].step_s),
    "mucudnn samples/s": lambda row: f"{row[0].throughput:.4g}",
    "efficiency": lambda row: f"{row[0].efficiency:.0%}",
    "waits": lambda row: _share(row[0], row[0].exposed_s),
    "best bucket_cap_mb": lambda row: f"{row[0].best_bucket_cap_mb:.3g}" if row[0].ranks > 1 else "",
    "waits then": lambda row: _share(row[0], row[0].best_cap_exposed_s),
}


def _share(point: Point, exposed_s: float) -> str:
    """Return the share of communication in a step as text; empty for a rank alone."""
    return f"{exposed_s / (point.compute_s + exposed_s):.0%}" if point.ranks > 1 else ""


def scale_table(title: str, points: Sequence[Point]) -> Table:
    """Return a table with a row for each number of ranks, first under strong, then under weak scaling."""
    torchs_s = {(point.scaling, point.ranks): point.step_s for point in points if point.convolutions is Variant.TORCH}
    ours = [point for point in points if point.convolutions is Variant.MUCUDNN]
    return table_of(
        [(point, torchs_s[point.scaling, point.ranks]) for point in ours],
        title,
        _LEFT,
        _RIGHT,
        caption=f"{_FAR}: extrapolated beyond the largest measured batch; waits: share of mucudnn's step in "
        "communication that the backward pass does not hide, with DistributedDataParallel's default buckets and with "
        "the best ones",
    )


def in_words(measured: MeasuredSteps) -> str:
    """Describe the steps that were measured, and the local batches that are too small for the device."""
    steps = "; ".join(
        f"{torchs.local_batch} samples {milliseconds(torchs.step_s)} and {milliseconds(ours.step_s)} ms"
        for torchs, ours in zip(*(measured.steps[variant] for variant in BOTH), strict=True)
    )
    starving = "; ".join(f"{shown_name(variant)} {measured.starving_below(variant)}" for variant in BOTH)
    gradients = measured.gradients
    return (
        f"measured in turns, PyTorch's step and mucudnn's: {steps}\n"
        f"the device starves, under {ENOUGH:.0%} of its best throughput, below a local batch of: {starving}\n"
        f"all-reduced in a step: {format_bytes(sum(gradients))} in {len(gradients)} gradients"
    )
