"""What training steps take within budgets of memory, and the largest batch that fits one.

Nothing is chosen for the model here: each budget, or batch size, is tried as ``optimize`` would choose for it
(``keeping.py``), and steps are counted, but not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mucudnn.core.config import Config, config_or_default
from mucudnn.core.errors import InfeasibleError, InvalidInputError, UnavailableError, warnings_deferred
from mucudnn.core.team import ALONE
from mucudnn.core.terminal import Progress, progress_of
from mucudnn.core.values import exact_bytes, format_bytes, instance, whole
from mucudnn.kernels.memory import is_out_of_memory
from mucudnn.measuring.clocks import wall_clock
from mucudnn.optimizing.keeping import Keeping, Traces, all_kept, keep, kept_within, without_updates
from mucudnn.optimizing.optimize import optimize
from mucudnn.optimizing.trace import MeasuredStep
from mucudnn.running.devices import device_of_convolutions
from mucudnn.running.dispatcher import DEVICE_TYPES
from mucudnn.running.keeping import KeepingModule, make_keeping
from mucudnn.tuning.model_state import OwnStep, is_training, undisturbed
from mucudnn.tuning.tuner import openmp_threads_ended

_STEPS = 3  # that are timed
_MOST_SAMPLES = 2**31
_MOST_GROWTH = 4  # of the batch from one try to the next, since the bytes of small batches may not grow
_MOST_GUESSES = 8  # of the largest batch, before the interval is halved


@warnings_deferred()
@openmp_threads_ended()
def step_curve(
    model: nn.Module,
    sample_input: Any,
    config: Config | None = None,
    *,
    points: int = 8,
    progress: Progress | bool | None = None,
) -> tuple[Keeping, ...]:
    """Return what a training step takes within budgets of memory, from the least to that with which all is kept.

    The convolutions of ``model``, in ``train()``, are tuned as by ``optimize`` without a memory budget. Then for each
    budget what is kept is chosen as ``optimize`` does for ``config.memory_budget``, and the bytes of a step are
    counted. Nothing of that stays in the model. Each budget can be given to ``optimize``. Each result has, in bytes and
    seconds:

    - ``budget_bytes``: of a step beside parameters, their gradients, the state of the optimizer and the batch;
    - ``predicted_bytes`` and ``peak_bytes``: of a step, predicted and counted;
    - ``time_s`` and ``predicted_s``: of what is computed again, and of the step, predicted from ``time_s`` and the time
      of a step that keeps all;
    - ``segments``: the parts of the model that run in micro-batches.

    Budgets ascend and times descend; those are left out that take no less time than a smaller one. Ranks of a process
    group tune together, as in ``optimize``; each then counts for itself.

    sample_input: what the model is called with.
    points: how many budgets are tried, at equal distances, from 2; ``config.memory_budget`` is one more, if it is among
        them.
    progress: as of ``optimize``.

    Raises ``InvalidInputError`` for a model in ``eval()`` or of a single layer, and the errors of ``optimize``.
    """
    config, points = config_or_default(config), whole(points, "points", 2)
    with _tuned(model, sample_input, config, progress) as (module, show):
        measured = MeasuredStep(module, OwnStep(sample_input), device_of_convolutions(module).type)
        kept = all_kept(module, measured, ALONE)
        all_bytes, all_s = kept.all_bytes, _seconds(measured)
        traces = Traces.of(module, measured, ALONE)
        least_bytes = min(kept_within(traces, 0, all_bytes).peak_bytes, all_bytes)
        budgets = {least_bytes + (all_bytes - least_bytes) * place // (points - 1) for place in range(points)}
        budgets.add(config.memory_budget_bytes or 0)
        curve: list[Keeping] = []
        for budget_bytes in sorted(size for size in budgets if least_bytes <= size < all_bytes):
            show(f"steps within {format_bytes(budget_bytes)}", (budget_bytes - least_bytes) / (all_bytes - least_bytes))
            keeping = kept_within(traces, budget_bytes, all_bytes)
            if not curve or keeping.time_s < curve[-1].time_s:
                curve.append(keeping)
        return tuple(replace(keeping, predicted_s=all_s + keeping.time_s) for keeping in (*curve, kept))


@warnings_deferred()
@openmp_threads_ended()
def largest_batch(
    model: nn.Module, sample_input: Any, config: Config, *, progress: Progress | bool | None = None
) -> tuple[int, Keeping]:
    """Return the largest batch size of which a training step fits ``config.memory_budget``, and what its step takes.

    The convolutions of ``model``, in ``train()``, are tuned for the sample, as by ``optimize`` without a memory budget.
    The bytes of a step grow nearly linearly with the batch. So sizes are named by extrapolation, and tried as
    ``optimize`` would choose for them, with bytes that are counted, until one fits and the next one does not. The
    attributes of what the step takes are those of the results of ``step_curve``.

    sample_input: what the model is called with, (N, ...). Larger batches repeat its samples: those of all tensors whose
        first dimension is that of the first one.
    progress: as of ``optimize``.

    A batch is traced in a step that keeps all, which needs more memory than the budget; ``optimize`` needs as much.
    Raises ``UnavailableError`` if there is not enough: give a smaller budget, or run on a device with more memory.
    Raises ``InfeasibleError`` with the least budget if no batch fits, ``InvalidInputError`` without a budget and for
    what ``step_curve`` refuses, and any error of the model.
    """
    budget_bytes = instance(Config, config, "config").memory_budget_bytes
    if budget_bytes is None:
        raise InvalidInputError('memory_budget is off; give the bytes of a step, such as Config(memory_budget="2GiB")')
    samples = next((len(x) for x in tree_leaves(sample_input) if isinstance(x, Tensor) and x.dim()), 0)
    if not samples:
        raise InvalidInputError("sample_input has no samples to repeat; give tensors of (N, ...) with N of at least 1")
    with _tuned(model, sample_input, config, progress) as (module, show):
        device = device_of_convolutions(module)

        def measured(size: int) -> MeasuredStep:
            return MeasuredStep(module, OwnStep(_repeated(sample_input, samples, size)), device.type)

        tried: dict[int, Keeping] = {}

        def least_bytes(size: int) -> int:
            show(f"steps of batches of {size}", 1 - 1 / (1 + len(tried)))
            all_bytes = max((size * keeping.all_bytes // known for known, keeping in tried.items()), default=0)
            try:
                if device.type == "cpu" and all_bytes > psutil.virtual_memory().available:
                    raise MemoryError  # where Linux would end the process
                keeping, least = _within_and_least(module, measured(size), budget_bytes)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                fits = max((known for known, one in tried.items() if one.peak_bytes <= budget_bytes), default=0)
                raise UnavailableError(
                    f"there is no memory for a step of a batch of {size} that keeps all, by which it is traced; {fits} "
                    "fit the budget: give a smaller memory_budget, or use a device with more memory"
                ) from error
            tried[size] = keeping
            return least

        size = largest_within(least_bytes, budget_bytes, samples)
        keep(module, None)
        return size, replace(tried[size], predicted_s=_seconds(measured(size)) + tried[size].time_s)


def _within_and_least(module: KeepingModule, step: MeasuredStep, budget_bytes: int) -> tuple[Keeping, int]:
    """Return what a step takes within the budget, or at least, and its least bytes."""
    keeping = replace(all_kept(module, step, ALONE), budget_bytes=budget_bytes)
    traces = Traces.of(module, step, ALONE)
    if keeping.all_bytes > budget_bytes:
        keeping = kept_within(traces, budget_bytes, keeping.all_bytes)
    least = keeping
    if keeping.peak_bytes <= budget_bytes:
        least = kept_within(traces, 0, keeping.all_bytes)
    return keeping, min(least.peak_bytes, keeping.all_bytes)


def largest_within(needed_bytes: Callable[[int], int], limit_bytes: int, first: int = 1) -> int:
    """Return the largest batch size of which a step needs at most this many bytes.

    needed_bytes: of a batch size; it grows with the size, nearly linearly.
    first: the size that is tried first.

    Raises ``InfeasibleError`` if one sample needs more, and any error of ``needed_bytes``.
    """
    fits, exceeds, size = 0, _MOST_SAMPLES, first
    before = before_bytes = count = 0
    while True:
        count, size_bytes = count + 1, needed_bytes(size)
        if size_bytes <= limit_bytes:
            fits = size
        else:
            exceeds = size
        if exceeds == 1:
            raise InfeasibleError(
                f"memory_budget is {exact_bytes(limit_bytes)}; a step of one sample needs at least "
                f"{exact_bytes(size_bytes)} beside parameters, gradients and the batch: give that",
                size_bytes,
            )
        if exceeds - fits == 1:
            return fits
        # The secant through the last two sizes, or bisection; at most what fits if a step needs nothing but samples.
        slope = (size_bytes - before_bytes) / (size - before)
        guess = size + int((limit_bytes - size_bytes) / slope) if slope > 0 else fits + 1
        if count >= _MOST_GUESSES:
            guess = (fits + exceeds) // 2
        most = max(_MOST_GROWTH * size, size * limit_bytes // max(1, size_bytes))
        before, before_bytes = size, size_bytes
        size = min(max(guess, fits + 1), exceeds - 1, most)


@contextmanager
def _tuned(
    model: nn.Module, sample_input: Any, config: Config, progress: Progress | bool | None
) -> Iterator[tuple[KeepingModule, Progress]]:
    """Tune a model in training. Yield it, to run steps that leave it as it is, and what shows progress."""
    if not is_training(instance(nn.Module, model, "model")):
        raise InvalidInputError("the model is in eval(), and a step is one of training: call model.train() first")
    device = device_of_convolutions(model)
    if device.type not in DEVICE_TYPES:
        raise UnavailableError(f"the model is on {device}; steps are counted on {' and '.join(DEVICE_TYPES)}")
    with progress_of(progress) as show:
        module = make_keeping(optimize(model, sample_input, replace(config, memory_budget=None), progress=show))
        try:
            with undisturbed(module), without_updates(module):
                yield module, show
        finally:
            keep(module, None)


def _seconds(measured: MeasuredStep) -> float:
    """Return the time of a step of the model as it is."""
    clock, times = wall_clock(measured.device_type), list[float]()
    for _ in range(_STEPS):
        begun_s = clock.now()
        measured.step(measured.model)
        times.append(clock.now() - begun_s)
    return median(times)


def _repeated(sample_input: Any, samples: int, size: int) -> Any:
    """Return a batch of ``size`` samples: those of the input, which has ``samples``, again and again."""

    def repeated(leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == samples):
            return leaf
        return torch.cat([leaf.detach()] * -(-size // samples))[:size].requires_grad_(leaf.requires_grad)

    return tree_map(repeated, sample_input)
