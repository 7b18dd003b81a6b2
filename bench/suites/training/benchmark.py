"""Training steps of a network: torch, torch searching for the best algorithms, and mucudnn; time and peak memory.

A step is forward pass, loss, backward pass and stochastic gradient descent with momentum. The variants of one precision
and memory format take turns in one run, each in a thread of its own (see ``own_thread``).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice, product

import torch
from torch import Tensor, nn

import mucudnn
from mucudnn.bench.contests.own_thread import OwnThread
from mucudnn.bench.contests.peak_memory import allocator_peak_bytes
from mucudnn.bench.measure.rounds import sample_in_rounds
from mucudnn.bench.measure.synchronized_clock import wall_clock
from mucudnn.bench.measure.timer import EVERY_ROUND, Clock, Timer
from mucudnn.bench.suites.training.precision import PRECISIONS, Precision
from mucudnn.bench.suites.training.training import Batch, Trainee, labelled_batches
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.words.config import Config
from mucudnn.words.errors import InvalidInputError, MucudnnError, first_line
from mucudnn.words.problem import MemoryFormat
from mucudnn.words.progress import Progress, silent
from mucudnn.words.torch_settings import rounding_to_tf32, searching

ROUNDS = 9
_RULE = replace(EVERY_ROUND, sample_s=0.25)  # short steps follow each other, as in training: no step is waited for


class Variant(StrEnum):
    """``TORCH_BENCHMARK``: torch in its benchmark mode, which times up to ten engines of its library."""

    TORCH = "torch"
    TORCH_BENCHMARK = "torch-benchmark"
    MUCUDNN = "mucudnn"


VARIANTS = {"cuda": tuple(Variant), "cpu": (Variant.TORCH, Variant.MUCUDNN)}


@dataclass(frozen=True, slots=True)
class Setting:
    """What the variants of one group have in common. device: ``cpu`` or ``cuda``."""

    network: str
    batch_size: int
    device: str
    precision: Precision
    memory_format: MemoryFormat

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision is Precision.BFLOAT16 else None


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step (median over the rounds), their IQR / median, and the most bytes of torch's allocator that it
    has in use at once, on top of parameters, optimizer and batch.
    """

    time_s: float
    noise: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TrainingCell:
    """One variant in one setting. cost: ``None`` where ``failure`` says why there is none."""

    setting: Setting
    variant: Variant
    cost: StepCost | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Course:
    """How to measure.

    rounds: samples of each variant, of a step or several. seconds: once they are over, no further precision or memory
    format is begun; ``None``: all are. clock: what times the steps (not the tuning); ``None``: a wall clock.
    """

    config: Config = field(default_factory=Config)
    rounds: int = ROUNDS
    seconds: float | None = None
    clock: Clock | None = None
    progress: Progress = silent


def measure_training(
    network: str,
    model: nn.Module,
    input_shape: tuple[int, int, int],
    *,
    batch_size: int,
    device: str = "cpu",
    precisions: Sequence[Precision] | None = None,
    memory_formats: Sequence[MemoryFormat] = tuple(MemoryFormat),
    course: Course | None = None,
) -> Iterator[tuple[TrainingCell, ...]]:
    """The variants' cells, one precision and memory format after the other, each as soon as it is measured.

    model: on the CPU, left as it is; of x: (N, *input_shape) it makes scores (N, classes) of ten classes or more.
    precisions: ``None``: all that the device has. A variant that fails has a cell with the reason, and so has what the
    time did not suffice for.

    Raises ``InvalidInputError`` for a precision that the device does not have.
    """
    course = course or Course()
    asked = _known(precisions, device)
    settings = [Setting(network, batch_size, device, *pair) for pair in product(asked, memory_formats)]
    (batch,) = labelled_batches(1, batch_size, input_shape)
    return _measured(settings, model, batch, course)


def _known(precisions: Sequence[Precision] | None, device: str) -> Sequence[Precision]:
    allowed = PRECISIONS[device]
    for precision in precisions or ():
        if precision not in allowed:
            raise InvalidInputError(f"precision is {precision}; device {device!r} has {', '.join(allowed)}")
    return allowed if precisions is None else precisions


def _measured(
    settings: Sequence[Setting], model: nn.Module, batch: Batch, course: Course
) -> Iterator[tuple[TrainingCell, ...]]:
    begun_s = time.monotonic()
    for index, setting in enumerate(settings):
        course.progress(f"{setting.network} {setting.precision} {setting.memory_format}", index / len(settings))
        if course.seconds is not None and time.monotonic() - begun_s > course.seconds:
            reason = f"not begun: the {course.seconds:g} s were over"
            yield tuple(TrainingCell(setting, variant, None, reason) for variant in VARIANTS[setting.device])
        else:
            yield _measure(setting, model, batch, course)


def _measure(setting: Setting, model: nn.Module, batch: Batch, course: Course) -> tuple[TrainingCell, ...]:
    with ExitStack() as stack:
        stack.enter_context(_rounding(setting))
        clock = course.clock or wall_clock(setting.device)
        contestants = [
            _Contestant(setting, variant, clock, stack.enter_context(OwnThread(setting.device)))
            for variant in VARIANTS[setting.device]
        ]
        for contestant in contestants:
            contestant.prepare(model, batch, course.config)
        timers = [contestant.timer for contestant in contestants if contestant.timer is not None]
        for _ in islice(sample_in_rounds(timers), course.rounds):
            pass
        return tuple(contestant.cell() for contestant in contestants)


@dataclass(slots=True, eq=False)
class _Contestant:
    """A variant while it is measured: after a failure, which is kept, it does nothing more."""

    setting: Setting
    variant: Variant
    clock: Clock
    thread: OwnThread
    timer: Timer | None = None
    peak_bytes: int = 0
    failure: str = ""

    def prepare(self, model: nn.Module, batch: Batch, config: Config) -> None:
        """Build, tune, warm up and take the peak memory. It is tuned in the caller's thread, which Ctrl-C reaches."""
        try:
            step = self._step(model, batch, config)
            self.peak_bytes = self.thread.call(allocator_peak_bytes, step, self.setting.device)
        except (MucudnnError, RuntimeError, MemoryError) as error:  # lack of memory is one of these
            self.failure = first_line(error)
        else:
            self.timer = Timer(step, self.clock, _RULE, runner=self.thread.call)

    def cell(self) -> TrainingCell:
        if self.timer is None:
            return TrainingCell(self.setting, self.variant, None, self.failure)
        if self.timer.error is not None:
            return TrainingCell(self.setting, self.variant, None, first_line(self.timer.error))
        cost = StepCost(self.timer.median_s, self.timer.noise, self.peak_bytes)
        return TrainingCell(self.setting, self.variant, cost)

    def _step(self, model: nn.Module, batch: Batch, config: Config) -> Callable[[], None]:
        """A training step, after which there are no gradients, as before it."""
        setting = self.setting
        torch_format = TORCH_FORMATS[setting.memory_format]
        own = copy.deepcopy(model).to(setting.device, memory_format=torch_format)  # type: ignore[call-overload]
        images, labels = _on_device(batch, setting)
        if self.variant is Variant.MUCUDNN:
            with torch.autocast(setting.device, setting.autocast, enabled=setting.autocast is not None):
                own = mucudnn.optimize(own, images, config)
        trainee = Trainee(own)

        def step() -> None:
            with searching(self.variant is Variant.TORCH_BENCHMARK):
                trainee.learn(images, labels, setting.autocast)
            trainee.optimizer.zero_grad()

        return step


def _on_device(batch: Batch, setting: Setting) -> tuple[Tensor, Tensor]:
    images, labels = batch
    torch_format = TORCH_FORMATS[setting.memory_format]
    return images.to(setting.device).contiguous(memory_format=torch_format), labels.to(setting.device)


@contextmanager
def _rounding(setting: Setting) -> Iterator[None]:
    """Float32 is rounded to TF32 or not, by convolutions and by matrix products; other precisions leave both alone.

    By torch's older switches: after the newer ones are used, torch refuses to read the older.
    """
    if setting.device == "cpu" or setting.precision is Precision.BFLOAT16:
        yield
        return
    with rounding_to_tf32(setting.precision is Precision.TF32):
        yield
