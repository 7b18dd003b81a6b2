"""Result of the training benchmark: what a step costs, variant by variant. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mucudnn.bench.contests.step_split import StepSplit
from mucudnn.bench.contests.variants import Variant
from mucudnn.words.problem import MemoryFormat


class Precision(StrEnum):
    """Precision in which a training step computes.

    ``TF32``: float32, but matrix products and convolutions round factors to 10 bits of mantissa. ``BFLOAT16``:
    autocast, with parameters in float32.
    """

    TF32 = "tf32"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


PRECISIONS = {"cuda": tuple(Precision), "cpu": (Precision.FLOAT32, Precision.BFLOAT16)}  # by type of device


class How(StrEnum):
    """Way in which mucudnn gets into a step.

    ``OPTIMIZE``: the modules of the model are tuned before, by ``mucudnn.optimize``. ``ENABLE``: all convolutions are
    tuned as they are met in a first step, which is not counted, under ``mucudnn.tuned``.
    """

    OPTIMIZE = "optimize"
    ENABLE = "enable"


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting that the variants of one group have in common. device: ``cpu`` or ``cuda``."""

    network: str
    batch_size: int
    device: str
    precision: Precision
    memory_format: MemoryFormat
    how: How = How.OPTIMIZE


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step (median over the rounds), their IQR / median, and the step's peak of memory.

    peak_bytes: most that it has in use at once in torch's allocator, on top of parameters, optimizer and batch. split:
    ``None`` where convolutions cannot be timed in place, as on CUDA. samples_s: one a round, in their order. kinds_s:
    seconds of each kind of layer in a step that was watched; empty where that cannot be told.
    """

    time_s: float
    noise: float
    peak_bytes: int
    split: StepSplit | None = None
    samples_s: tuple[float, ...] = field(default=(), compare=False, repr=False)
    kinds_s: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class VariantResult:
    """One variant in one setting. cost: ``None`` where ``failure`` says why there is none.

    With a cost, ``failure`` says why it is not split, if anything went wrong.
    """

    setting: Setting
    variant: Variant
    cost: StepCost | None
    failure: str = ""
