"""Measures training steps of a network: torch, torch in its benchmark mode, and mucudnn; time and peak memory.

A step is forward pass, loss, backward pass and stochastic gradient descent with momentum. The variants of one precision
and memory format take turns in one run, each in a thread of its own (see ``own_thread``).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice, product

import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.contests.own_thread import OwnThread
from mucudnn.bench.contests.peak_memory import allocator_peak_bytes
from mucudnn.bench.contests.step_splitter import StepSplitter
from mucudnn.bench.sources.networks.objectives import CLASSIFICATION, Objective
from mucudnn.bench.sources.trainee import Batch, Trainee, labelled_batches
from mucudnn.bench.suites.training.result import (
    PRECISIONS,
    VARIANTS,
    How,
    Precision,
    Setting,
    StepCost,
    Variant,
    VariantResult,
)
from mucudnn.bench.timing.rounds import sample_in_rounds
from mucudnn.bench.timing.synchronized_clock import wall_clock
from mucudnn.bench.timing.timer import EVERY_ROUND, Clock, Runner, T, Timer
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError, MucudnnError, first_line
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import Progress, silent
from mucudnn.words.torch_settings import rounding_to_tf32, searching

ROUNDS = 9
_SPLIT_ON = ("cpu",)  # on a GPU the events of a step are on its thread's stream, which the recorder does not know
_RULE = replace(EVERY_ROUND, sample_s=0.25)  # short steps follow each other as in training: none is waited for


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of measuring.

    rounds: samples of each variant; a sample has one step or several. seconds: once they are over, no further precision
    or memory format is begun; ``None``: all are. clock: clock of the steps (not of the tuning); ``None``: a wall clock.
    begun_s: when the seconds began, by ``time.monotonic``; ``None``: when the first setting is begun. how: way in which
    mucudnn gets into the step. passes_over: says which settings are not to be measured, as an earlier run has them.
    """

    config: Config = field(default_factory=Config)
    rounds: int = ROUNDS
    seconds: float | None = None
    clock: Clock | None = None
    progress: Progress = silent
    begun_s: float | None = None
    how: How = How.OPTIMIZE
    passes_over: Callable[[Setting], bool] = lambda _: False


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

    Raises ``InvalidInputError`` for a precision that the device does not have.
    """
    options = options or TrainingOptions()
    asked = known_precisions(precisions, device)
    settings = [Setting(network, batch_size, device, *pair, options.how) for pair in product(asked, memory_formats)]
    settings = [setting for setting in settings if not options.passes_over(setting)]
    (batch,) = labelled_batches(1, batch_size, input_shape)
    return _measured(settings, _Subject(model, batch, objective), options)


def known_precisions(precisions: Sequence[Precision] | None, device: str) -> Sequence[Precision]:
    """Return the precisions asked for; ``None``: all of the device. Raises ``InvalidInputError`` as measuring does."""
    allowed = PRECISIONS[device]
    for precision in precisions or ():
        if precision not in allowed:
            raise InvalidInputError(f"precision is {precision}; device {device!r} has {', '.join(allowed)}")
    return allowed if precisions is None else precisions


def _measured(
    settings: Sequence[Setting], subject: _Subject, options: TrainingOptions
) -> Iterator[tuple[VariantResult, ...]]:
    begun_s = time.monotonic() if options.begun_s is None else options.begun_s
    for index, setting in enumerate(settings):
        options.progress(f"{setting.network} {setting.precision} {setting.memory_format}", index / len(settings))
        if options.seconds is not None and time.monotonic() - begun_s > options.seconds:
            reason = f"not begun: the {options.seconds:g} s were over"
            yield tuple(VariantResult(setting, variant, None, reason) for variant in VARIANTS[setting.device])
        else:
            yield _measure(setting, subject, options)


def _measure(setting: Setting, subject: _Subject, options: TrainingOptions) -> tuple[VariantResult, ...]:
    with ExitStack() as stack:
        stack.enter_context(_rounding(setting))
        clock = options.clock or wall_clock(setting.device)
        measured = [
            _MeasuredVariant(setting, variant, clock, stack.enter_context(OwnThread(setting.device)))
            for variant in VARIANTS[setting.device]
        ]
        for one in measured:
            one.prepare(subject, options.config)
        timers = [one.timer for one in measured if one.timer is not None]
        for _ in islice(sample_in_rounds(timers), options.rounds):
            for one in measured:
                one.sample_split()
        return tuple(one.result() for one in measured)


@dataclass(frozen=True, slots=True)
class _Subject:
    """Subject of a training: a model on the CPU, which is copied, with the images and labels of a batch."""

    model: nn.Module
    batch: Batch
    objective: Objective

    def on_device(self, setting: Setting) -> tuple[tuple[Tensor, ...], Tensor]:
        """All arguments of the model, the images in the setting's memory format, and the target."""
        images, labels = (tensor.to(setting.device) for tensor in self.batch)
        images = images.contiguous(memory_format=TORCH_FORMATS[setting.memory_format])
        return self.objective.arguments(images), self.objective.target(images, labels)


@dataclass(slots=True, eq=False)
class _MeasuredVariant:
    """A variant while it is measured. After a failure, which is kept, it does nothing more."""

    setting: Setting
    variant: Variant
    clock: Clock
    thread: OwnThread
    timer: Timer | None = None
    splitter: StepSplitter | None = None
    peak_bytes: int = 0
    failure: str = ""

    def prepare(self, subject: _Subject, config: Config) -> None:
        """Build, tune, warm up and take the peak memory. Tuning runs in the caller's thread, which Ctrl-C reaches."""
        try:
            model, step = self._model_and_step(subject, config)
            runner = self._runner(config)
            if self._is_enabled:
                with mucudnn.tuned(config):
                    step()  # all convolutions are met
            self.peak_bytes = runner(lambda: allocator_peak_bytes(step, self.setting.device))
        except (MucudnnError, RuntimeError, MemoryError) as error:  # lack of memory is among them
            self.failure = first_line(error)
        else:
            self.timer = Timer(step, self.clock, _RULE, runner=runner)
            if self.setting.device in _SPLIT_ON:
                self.splitter = StepSplitter.of(model, step, self.clock, runner)

    @property
    def _is_enabled(self) -> bool:
        return self.variant is Variant.MUCUDNN and self.setting.how is How.ENABLE

    def _runner(self, config: Config) -> Runner:
        """Place of the steps: the thread, and under ``mucudnn.tuned`` if they are to be tuned so."""
        if not self._is_enabled:
            return self.thread.call

        def run(function: Callable[[], T], /) -> T:
            with mucudnn.tuned(config):  # for the process: so the other variants run outside of it
                return self.thread.call(function)

        return run

    def sample_split(self) -> None:
        """Split as many steps as a sample of the timer has. Where that fails, there is no split."""
        if self.timer is None or self.timer.error is not None:
            self.splitter = None  # lets go of the model
        if self.splitter is None or self.timer is None:
            return
        try:
            self.splitter.sample(max(1, round(_RULE.sample_s / self.timer.samples_s[-1])))
        except (MucudnnError, RuntimeError, MemoryError) as error:
            self.splitter, self.failure = None, f"not split: {first_line(error)}"

    def result(self) -> VariantResult:
        if self.timer is None:
            return VariantResult(self.setting, self.variant, None, self.failure)
        if self.timer.error is not None:
            return VariantResult(self.setting, self.variant, None, first_line(self.timer.error))
        split = None if self.splitter is None else self.splitter.median()
        cost = StepCost(self.timer.median_s, self.timer.noise, self.peak_bytes, split, tuple(self.timer.samples_s))
        return VariantResult(self.setting, self.variant, cost, self.failure)

    def _model_and_step(self, subject: _Subject, config: Config) -> tuple[nn.Module, Callable[[], None]]:
        """A copy of the model, and a training step of it that leaves no gradients, as it finds none."""
        setting = self.setting
        autocast = torch.bfloat16 if setting.precision is Precision.BFLOAT16 else None
        torch_format = TORCH_FORMATS[setting.memory_format]
        own = copy.deepcopy(subject.model).to(setting.device, memory_format=torch_format)  # type: ignore[call-overload]
        arguments, target = subject.on_device(setting)
        if self.variant is Variant.MUCUDNN and not self._is_enabled:
            with torch.autocast(setting.device, autocast, enabled=autocast is not None):
                own = mucudnn.optimize(own, arguments, config)
        trainee = Trainee(own, objective=subject.objective)

        def step() -> None:
            with searching(self.variant is Variant.TORCH_BENCHMARK):
                trainee.learn(arguments, target, autocast)
            trainee.optimizer.zero_grad()

        return own, step


@contextmanager
def _rounding(setting: Setting) -> Iterator[None]:
    """Round float32 to TF32 or not, in convolutions and in matrix products. Other precisions leave both alone."""
    if setting.device == "cpu" or setting.precision is Precision.BFLOAT16:
        yield
        return
    with rounding_to_tf32(setting.precision is Precision.TF32):
        yield
