"""Settings of the benchmark of training steps. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mucudnn.words.problem import MemoryFormat


class Precision(StrEnum):
    """The precision in which a training step computes.

    ``TF32``: float32, but matrix products and convolutions round factors to 10 bits of mantissa. ``BFLOAT16``:
    autocast, with parameters in float32.
    """

    TF32 = "tf32"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


PRECISIONS = {"cuda": tuple(Precision), "cpu": (Precision.FLOAT32, Precision.BFLOAT16)}  # by type of device


class How(StrEnum):
    """The way mucudnn is applied to a step.

    ``OPTIMIZE``: the model is tuned beforehand by ``mucudnn.optimize``. ``ENABLE``: all convolutions are tuned during a
    warm-up step under ``mucudnn.tuned``.
    """

    OPTIMIZE = "optimize"
    ENABLE = "enable"


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


COLUMNS = ("network", "batch_size", "precision", "memory_format", "how")
