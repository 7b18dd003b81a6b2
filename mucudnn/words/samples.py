"""Raw samples: the single timings that a measurement or a whole run is made of, and the processor meanwhile.

They stand beside the results (``results.py``) and not in their numbers: who chooses reads medians, who judges a median
reads its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import quantiles


@dataclass(frozen=True, slots=True)
class MeasuredSamples:
    """Samples of a measurement, in the order in which they were taken: seconds of one setup, and of one step.

    stolen: share of the time of the cores that a hypervisor gave to others meanwhile, from 0 to 1. clock_hz: of the
    fastest core. None: unknown.
    """

    setup_samples_s: tuple[float, ...]
    step_samples_s: tuple[float, ...]
    stolen: float | None = None
    clock_hz: float | None = None


@dataclass(frozen=True, slots=True)
class PairedSamples:
    """Samples of a whole run and of its baseline, in seconds: those with the same index ran in the same round.

    stolen, clock_hz: as of ``MeasuredSamples``.
    """

    baseline_samples_s: tuple[float, ...]
    time_samples_s: tuple[float, ...]
    stolen: float | None = None
    clock_hz: float | None = None

    @property
    def speedups(self) -> list[float]:
        """Baseline / run in each round: a slow minute of the machine, which both meet, cancels."""
        return [b / t for b, t in zip(self.baseline_samples_s, self.time_samples_s, strict=True)]


def uncertainty(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the values' median, 1.57 IQR / sqrt(n); inf for a single value.

    McGill, Tukey, Larsen 1978, "Variations of box plots".
    """
    if len(values) < 2:
        return inf
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return 1.57 * (upper - lower) / sqrt(len(values))
