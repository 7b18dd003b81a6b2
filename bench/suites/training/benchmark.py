"""Measures training steps of a network: torch, torch in its benchmark mode, mucudnn, and compiled.

A step is forward pass, loss, backward pass and stochastic gradient descent with momentum. The variants of one precision
and memory format take turns in one run, each in a process of its own (see ``apart``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

import torch
from torch import nn

from mucudnn.bench.contests.apart import SAMPLED, Apart, Entrant
from mucudnn.bench.contests.kind_times import median_by_kind
from mucudnn.bench.contests.processes import OwnProcessError
from mucudnn.bench.contests.step_split import StepSplit
from mucudnn.bench.contests.variants import Variant, chosen_variants
from mucudnn.bench.sources.networks.objectives import CLASSIFICATION, Objective
from mucudnn.bench.sources.trainee import labelled_batches
from mucudnn.bench.suites.training.result import (
    PRECISIONS,
    How,
    Precision,
    Setting,
    StepCost,
    VariantResult,
)
from mucudnn.bench.suites.training.step_job import SPLIT_ON, StepJob, StepParts, Subject
from mucudnn.measuring.timing.rounds import sample_in_rounds
from mucudnn.measuring.timing.synchronized_clock import wall_clock
from mucudnn.measuring.timing.timer import Clock
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import Progress, share_of, silent

ROUNDS = 9


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of measuring.

    rounds: samples of each variant; a sample has one step or several. seconds: once they are over, no further precision
    or memory format is begun; ``None``: all are. clock: clock of the steps (not of the tuning); ``None``: a wall clock.
    begun_s: when the seconds began, by ``time.monotonic``; ``None``: when the first setting is begun. how: way in which
    mucudnn gets into the step. passes_over: says which settings are not to be measured, as an earlier run has them.
    variants: those beside torch's own; ``None``: all of the device. apart: makes the place in which variants are apart.
    """

    config: Config = field(default_factory=Config)
    rounds: int = ROUNDS
    seconds: float | None = None
    clock: Clock | None = None
    progress: Progress = silent
    begun_s: float | None = None
    how: How = How.OPTIMIZE
    passes_over: Callable[[Setting], bool] = lambda _: False
    variants: Sequence[Variant] | None = None
    apart: Callable[[], Apart] = Apart


def measure_training(
    network: str,
    model: nn.Module,
    input_shape: tuple[int, int, int],
    *,
    batch_size: int,
    device: str = "cpu",
    precisions: Sequence[Precision] | None = None,
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
    objective: Objective = CLASSIFICATION,
    options: TrainingOptions | None = None,
) -> Iterator[tuple[VariantResult, ...]]:
    """Measure the variants, one precision and memory format after the other. Yields each group when it is measured.

    model: on the CPU, left as it is; its first argument is x: (N, *input_shape). objective: what it is trained for, on
    images with ten labels. precisions: ``None``: all that the device has. A variant that fails has a result with the
    reason, and so has what the time did not suffice for.

    Raises ``InvalidInputError`` for a precision or a variant that the device does not have.
    """
    options = options or TrainingOptions()
    asked = known_precisions(precisions, device)
    chosen_variants(options.variants, device)
    settings = [Setting(network, batch_size, device, *pair, options.how) for pair in product(asked, memory_formats)]
    settings = [setting for setting in settings if not options.passes_over(setting)]
    (batch,) = labelled_batches(1, batch_size, input_shape)
    return _measured(settings, Subject(model, batch, objective), options)


def known_precisions(precisions: Sequence[Precision] | None, device: str) -> Sequence[Precision]:
    """Return the precisions asked for; ``None``: all of the device. Raises ``InvalidInputError`` as measuring does."""
    allowed = PRECISIONS[device]
    for precision in precisions or ():
        if precision not in allowed:
            raise InvalidInputError(f"precision is {precision}; device {device!r} has {', '.join(allowed)}")
    return allowed if precisions is None else precisions


def _measured(
    settings: Sequence[Setting], subject: Subject, options: TrainingOptions
) -> Iterator[tuple[VariantResult, ...]]:
    begun_s = time.monotonic() if options.begun_s is None else options.begun_s
    for index, setting in enumerate(settings):
        options.progress(f"{setting.network} {setting.precision} {setting.memory_format}", index / len(settings))
        if options.seconds is not None and time.monotonic() - begun_s > options.seconds:
            reason = f"not begun: the {options.seconds:g} s were over"
            yield tuple(
                VariantResult(setting, one, None, reason) for one in chosen_variants(options.variants, setting.device)
            )
        else:
            share = share_of(options.progress, index / len(settings), 1 / len(settings))
            yield _measure(setting, subject, replace(options, progress=share))


def _measure(setting: Setting, subject: Subject, options: TrainingOptions) -> tuple[VariantResult, ...]:
    threads, clock = torch.get_num_threads(), options.clock or wall_clock(setting.device)
    with options.apart() as apart:
        handed = apart.handed(subject)
        variants, measured = chosen_variants(options.variants, setting.device), list[_MeasuredVariant]()
        for index, variant in enumerate(variants):
            what = f"{setting.network} {setting.precision} {setting.memory_format}: {variant} gets ready"
            options.progress(what, index / len(variants))
            job = StepJob(handed, setting, variant, options.config, threads, clock)
            measured.append(_MeasuredVariant(setting, variant, Entrant.started(apart, job)))
        timers = [one.entrant.timer for one in measured if one.entrant.timer is not None]
        for _ in islice(sample_in_rounds(timers), options.rounds):
            for one in measured:
                one.sample_parts()
        return tuple(one.result() for one in measured)


@dataclass(slots=True, eq=False)
class _MeasuredVariant:
    """A variant while it is measured."""

    setting: Setting
    variant: Variant
    entrant: Entrant[int]
    parts: list[StepParts] = field(default_factory=list)

    def sample_parts(self) -> None:
        """Split as many steps as a sample of the timer has, unless a step has failed."""
        timer, process = self.entrant.timer, self.entrant.process
        if self.setting.device not in SPLIT_ON or timer is None or process is None or timer.error is not None:
            return
        try:
            found = process.ask(max(1, round(SAMPLED.sample_s / timer.samples_s[-1])))
        except OwnProcessError as error:
            timer.error = error
        else:
            self.parts.append(found)

    def result(self) -> VariantResult:
        timer, process = self.entrant.timer, self.entrant.process
        if timer is None or process is None or self.entrant.failure:
            return VariantResult(self.setting, self.variant, None, self.entrant.failure)
        splits = [part.split for part in self.parts if part.split is not None]
        failure = next((part.failure for part in self.parts if part.failure), "")
        cost = StepCost(
            timer.median_s,
            timer.noise,
            process.found,
            None if failure or not splits else StepSplit.median(splits),
            tuple(timer.samples_s),
            {} if failure else median_by_kind([part.kinds_s for part in self.parts if part.kinds_s]),
        )
        return VariantResult(self.setting, self.variant, cost, failure)
