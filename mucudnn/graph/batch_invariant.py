"""Graphs with which a sample has the same bits alone and in any batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mucudnn.core.config import Config
from mucudnn.core.terminal import Progress
from mucudnn.graph.capture import NotCapturedError
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

    The batch runs the plan of one sample: each segment for all samples at once if its algorithms then compute the same
    bits, otherwise sample by sample. There is no schedule for the batch within a memory budget, nor if its results
    differ from those of single samples.

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
    schedule = _with_same_bits(of_sample.schedule, of_batch.schedule, arguments)
    if schedule is None:
        return [(first, replace(of_sample, unrestricted_s=of_batch.time_s / n))]
    with machine_and_database(config, "cpu") as (machine, database), torch.no_grad():
        what = f"calls in turns: {digest(f'{schedule_key(of_batch.schedule)} {schedule_key(schedule)}')}"
        calls = (partial(each.run, arguments) for each in (of_batch.schedule, schedule))
        timings = Timings(machine, database, config, progress)
        run = timings.compared(what, next(calls), [next(calls)], ROUNDS)[0]
    schedule.settle(inf)
    invariant = replace(
        of_batch, schedule=schedule, time_s=run.time_s, unrestricted_s=run.baseline_s, whole_run=None, torch_bytes=None
    )
    return [(first, replace(of_sample, unrestricted_s=of_sample.time_s)), (arguments, invariant)]


@torch.no_grad()
def _with_same_bits(of_sample: Schedule, of_batch: Schedule, arguments: tuple[Any, ...]) -> Schedule | None:
    """Return a schedule for the batch by the plan of one sample; None if no such schedule has the same bits.

    of_batch: a schedule for the batch by another plan, of which the graph is used.
    """
    operators = [(type(operator), operator.name) for operator in of_sample.operators]
    if operators != [(type(operator), operator.name) for operator in of_batch.operators]:
        return None
    n, convolutions = of_batch.captured.samples, convolutions_of(of_sample.operators)
    together = {}  # of convolutions; which algorithm PyTorch's own chooses may depend on the batch
    for index, convolution in convolutions.items():
        algorithm = of_sample.algorithms[index]
        together[index] = algorithm is not None and has_same_bits(algorithm, convolution.problem, n)
    parts = [of_sample.run(samples_of(arguments, sample, sample + 1)) for sample in range(n)]
    expected = tree_leaves(joined(parts))
    costed = replace(of_batch.costed, kept=of_sample.costed.kept)
    for may_be_together in (True, False):
        segments = []
        for segment in of_sample.plan.segments:
            is_together = may_be_together and all(together.get(i, True) for i in range(segment.start, segment.stop))
            segments.append(replace(segment, cut=replace(segment.cut, samples=n if is_together else 1)))
        schedule = Schedule(costed, replace(of_sample.plan, segments=tuple(segments)), of_sample.algorithms)
        if all(map(are_equal, tree_leaves(counted(schedule, arguments)), expected)):
            return schedule
    return None
