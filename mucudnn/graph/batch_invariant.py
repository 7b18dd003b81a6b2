"""Graphs with which a sample has the same bits alone and in any batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mucudnn.core.config import Config
from mucudnn.core.records import Comparison
from mucudnn.core.terminal import Progress
from mucudnn.graph.capture import NotCapturedError
from mucudnn.graph.costed import CostedGraph
from mucudnn.graph.costs import digest, schedule_key
from mucudnn.graph.fitting import ROUNDS, Fitted, are_equal, fit
from mucudnn.graph.least import counted
from mucudnn.graph.model import batch_size_of, joined, samples_of
from mucudnn.graph.operators.convolution import convolutions_of
from mucudnn.graph.schedule import Schedule
from mucudnn.measuring.same_bits import has_same_bits
from mucudnn.measuring.timings import Timings
from mucudnn.tuning.tuner import machine_and_database


def fit_invariant(
    model: nn.Module, arguments: tuple[Any, ...], config: Config, progress: Progress
) -> list[tuple[tuple[Any, ...], Fitted]]:
    """Return schedules with which a sample has the same bits, for one sample and for a batch, with their arguments.

    Both run by the plan that is the fastest for one sample, or for the batch, whichever of the two loses less. The
    batch runs each segment for all samples at once if its algorithms then compute the same bits, otherwise sample by
    sample. There is no schedule for the batch within a memory budget, nor if its results differ from those of single
    samples.

    arguments: tensors among them have the same first size, the number of samples.

    Raises the errors of ``fit``, and ``NotCapturedError`` if first sizes differ.
    """
    n, first = batch_size_of(arguments), samples_of(arguments, 0, 1)
    if n == 0:
        raise NotCapturedError("batch_invariant needs arguments of one number of samples, at least 1")
    of_sample = fit(model, first, config, progress)
    if n == 1 or config.memory_budget is not None:
        return [(first, replace(of_sample, unrestricted_s=of_sample.time_s))]
    of_batch = fit(model, arguments, config, progress)
    pairs = [*_pairs(of_sample.schedule, of_batch.schedule, arguments)]
    if not pairs:
        return [(first, replace(of_sample, unrestricted_s=of_batch.time_s / n))]
    with machine_and_database(config, "cpu") as (machine, database):
        timings = Timings(machine, database, config, progress)
        samples = _compared(of_sample.schedule, [sample for sample, _ in pairs], first, timings)
        batches = _compared(of_batch.schedule, [batch for _, batch in pairs], arguments, timings)
    best = max(samples.keys() & batches, key=lambda number: samples[number].speedup * batches[number].speedup)
    fitted = []
    for of_size, schedule, run in zip((of_sample, of_batch), pairs[best], (samples[best], batches[best]), strict=True):
        schedule.settle(inf)
        of_size = replace(of_size, schedule=schedule, whole_run=None, torch_bytes=None)
        fitted.append(replace(of_size, time_s=run.time_s, unrestricted_s=run.baseline_s))
    return [*zip((first, arguments), fitted, strict=True)]


@torch.no_grad()
def _pairs(of_sample: Schedule, of_batch: Schedule, arguments: tuple[Any, ...]) -> Iterator[tuple[Schedule, Schedule]]:
    """Yield schedules for one sample and for the batch that compute the same bits, by the plan of either schedule."""
    operators = [(type(operator), operator.name) for operator in of_sample.operators]
    if operators != [(type(operator), operator.name) for operator in of_batch.operators]:
        return
    n, convolutions = of_batch.captured.samples, convolutions_of(of_sample.operators)
    for planned in (of_sample, of_batch):
        if planned is of_batch and of_sample.algorithms == of_batch.algorithms:
            return
        together = {}  # of convolutions; which algorithm PyTorch's own chooses may depend on the batch
        for index, convolution in convolutions.items():
            algorithm = planned.algorithms[index]
            together[index] = algorithm is not None and has_same_bits(algorithm, convolution.problem, n)
        sample = of_sample if planned is of_sample else _by_plan_of(planned, of_sample.costed)
        parts = [sample.run(samples_of(arguments, number, number + 1)) for number in range(n)]
        expected = tree_leaves(joined(parts))
        for may_be_together in (together, None):
            batch = _by_plan_of(planned, of_batch.costed, may_be_together)
            if all(map(are_equal, tree_leaves(counted(batch, arguments)), expected)):
                yield sample, batch
                break


def _by_plan_of(planned: Schedule, costed: CostedGraph, together: Mapping[int, bool] | None = None) -> Schedule:
    """Return a schedule by the plan of another, for the samples of this graph.

    together: whether each convolution may compute all samples at once; None if all operators run sample by sample.
    """
    segments = []
    for segment in planned.plan.segments:
        samples, operators = 1, range(segment.start, segment.stop)
        if together is not None and segment.cut.bands == 1 and all(together.get(index, True) for index in operators):
            samples = costed.captured.samples
        segments.append(replace(segment, cut=replace(segment.cut, samples=samples)))
    plan = replace(planned.plan, segments=tuple(segments))
    return Schedule(replace(costed, kept=planned.costed.kept), plan, planned.algorithms)


def _compared(
    fastest: Schedule, schedules: Sequence[Schedule], arguments: tuple[Any, ...], timings: Timings
) -> dict[int, Comparison]:
    """Return comparisons of schedules with the fastest one without these bits, in calls in turns, by number."""
    what = f"calls in turns: {digest(' '.join(map(schedule_key, (fastest, *schedules))))}"
    calls = [partial(schedule.run, arguments) for schedule in (fastest, *schedules)]
    with torch.no_grad():
        return timings.compared(what, calls[0], calls[1:], replace(ROUNDS, race=False))
