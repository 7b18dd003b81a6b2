"""Preparation of a model's training step in its own process, for one variant of its convolutions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import mucudnn
from mucudnn.bench.results.variants import How, Precision, Variant
from mucudnn.bench.sources.networks.objectives import Loss
from mucudnn.bench.sources.trainee import Batch, Trainee
from mucudnn.bench.suites.shared.apart import Ready
from mucudnn.bench.suites.shared.peak_memory import allocator_peak_bytes
from mucudnn.bench.suites.shared.step_parts import KindTimes, StepSplit, StepSplitter
from mucudnn.core.config import Config
from mucudnn.core.errors import MucudnnError, first_line
from mucudnn.core.problem import MemoryFormat
from mucudnn.core.torch_settings import rounding_to_tf32, searching
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.measuring.clocks import Clock
from mucudnn.measuring.turns import Runner, T, here

SPLIT_ON = ("cpu",)  # Splitting a step on a GPU would need CUDA events, which is untested.
COLUMNS = ("network", "batch_size", "precision", "memory_format", "how")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in which the variants of a training step are compared. device: ``cpu`` or ``cuda``."""

    network: str
    batch_size: int
    device: str
    precision: Precision
    memory_format: MemoryFormat
    how: How = How.OPTIMIZE

    @property
    def subject(self) -> dict[str, Any]:
        """Return the columns that identify the result rows of this setting."""
        return {name: getattr(self, name) for name in COLUMNS}

    def __str__(self) -> str:
        return f"{self.network}, batch {self.batch_size}, {self.precision} {self.memory_format}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model on the CPU, which each variant copies before training, with the images and labels of a batch."""

    model: nn.Module
    batch: Batch
    loss: Loss

    def on_device(self, setting: Setting) -> Batch:
        """Return the batch on the setting's device, images in its memory format."""
        images, labels = (tensor.to(setting.device) for tensor in self.batch)
        return images.contiguous(memory_format=TORCH_FORMATS[setting.memory_format]), labels


@dataclass(frozen=True, slots=True)
class StepParts:
    """The times of a few training steps, split into convolutions and the rest, and by kind of layer.

    failure: why the steps could not be split; empty if they were split.
    """

    split: StepSplit | None = None
    kinds_s: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class StepJob:
    """A picklable job for another process: builds, tunes or compiles a variant's model and prepares its step.

    subject: returns the model to train. threads: number of torch's threads. clock: times the steps. A call of the job
    warms up, and returns the step to time and its peak bytes; the job can also measure ``StepParts``. Raises any error
    of building, tuning, compiling and of a step.
    """

    subject: Callable[[], Subject]
    setting: Setting
    variant: Variant
    config: Config
    threads: int
    clock: Clock

    def __call__(self) -> Ready[int]:
        torch.set_num_threads(self.threads)
        with _rounding(self.setting):  # It affects which algorithms may run.
            return self._ready()

    def _ready(self) -> Ready[int]:
        model, step = self._model_and_step(self.subject())
        if self._is_enabled:
            with mucudnn.tuned(self.config):
                step()  # The first step tunes all convolutions.
        peak_bytes = self._run(lambda: allocator_peak_bytes(step, self.setting.device))
        parts = _Parts(model, step, self.clock, self._run, self.variant.is_compiled) if self._is_split else None
        return Ready(step, peak_bytes, self._run, self.clock, parts)

    @property
    def _is_split(self) -> bool:
        return self.setting.device in SPLIT_ON

    @property
    def _is_enabled(self) -> bool:
        return self.variant.is_ours and self.setting.how is How.ENABLE

    def _run(self, function: Callable[[], T], /) -> T:
        """Call a function that runs steps, under the settings of this variant, and return its result."""
        with _rounding(self.setting):
            if not self._is_enabled:
                return function()
            with mucudnn.tuned(self.config):
                return function()

    def _model_and_step(self, subject: Subject) -> tuple[nn.Module, Callable[[], None]]:
        """Return a copy of the model, and a function that trains it for one step.

        Gradients are None before and after the step.
        """
        setting = self.setting
        autocast: torch.dtype | None = getattr(torch, setting.precision) if setting.precision.is_half else None
        torch_format = TORCH_FORMATS[setting.memory_format]
        own = copy.deepcopy(subject.model).to(setting.device, memory_format=torch_format)  # type: ignore[call-overload]
        images, labels = subject.on_device(setting)
        if self.variant.is_ours and not self._is_enabled:
            with torch.autocast(setting.device, autocast, enabled=autocast is not None):
                own = mucudnn.optimize(own, images, self.config, progress=False)
        called: Any = torch.compile(own) if self.variant.is_compiled else own
        trainee = Trainee(called, loss=subject.loss)

        def step() -> None:
            with searching(self.variant is Variant.TORCH_BENCHMARK):
                trainee.learn(images, labels, autocast)
            trainee.optimizer.zero_grad()

        return own, step


@dataclass(slots=True, eq=False)
class _Parts:
    """A callable that splits steps into their parts. After a failure it returns that failure and does not try again."""

    model: nn.Module
    step: Callable[[], None]
    clock: Clock
    runner: Runner = here
    is_compiled: bool = False
    splitter: StepSplitter | None = None
    kinds: KindTimes | None = None
    failure: str = ""

    def __call__(self, steps: int) -> StepParts:
        if self.failure:
            return StepParts(failure=self.failure)
        try:
            if self.splitter is None or self.kinds is None:
                self.splitter = StepSplitter(self.step, self.clock, self.runner)
                self.kinds = KindTimes(self.step, self.clock, self.runner, is_compiled=self.is_compiled)
            self.splitter.sample(steps)
            return StepParts(self.splitter.samples[-1], self.kinds.sample())
        except (MucudnnError, RuntimeError, MemoryError) as error:
            self.failure = f"not split: {first_line(error)}"
            return StepParts(failure=self.failure)


@contextmanager
def _rounding(setting: Setting) -> Iterator[None]:
    """Switch TF32 on or off in convolutions and matrix products for this context; other precisions change nothing."""
    if setting.device == "cpu" or setting.precision.is_half:
        yield
        return
    with rounding_to_tf32(setting.precision is Precision.TF32):
        yield
