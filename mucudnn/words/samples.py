"""Raw samples: the individual timings behind a measurement or a whole run, and the state of the processor meanwhile.

They are kept apart from the results (``results.py``): choices need only medians; samples show how good a median is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import quantiles


@dataclass(frozen=True, slots=True)
class MeasuredSamples:
    """Samples of a measurement, in the order in which they were taken: seconds of one setup, and of one step.

    stolen: fraction of the cores' time that the hypervisor gave to other guests, from 0 to 1. clock_hz: clock rate of
    the fastest core. Both are None if unknown.
    """

    setup_samples_s: tuple[float, ...]
    step_samples_s: tuple[float, ...]
    stolen: float | None = None
    clock_hz: float | None = None


@dataclass(frozen=True, slots=True)
class PairedSamples:
    """Samples of a whole run and of its baseline, in seconds; samples of the same index ran in the same round.

    stolen, clock_hz: as in ``MeasuredSamples``.
    """

    baseline_samples_s: tuple[float, ...]
    time_samples_s: tuple[float, ...]
    stolen: float | None = None
    clock_hz: float | None = None

    @property
    def speedups(self) -> list[float]:
        """Baseline over run in each round; machine slowdowns cancel, since they affect both."""
        return [b / t for b, t in zip(self.baseline_samples_s, self.time_samples_s, strict=True)]


def uncertainty(values: Sequence[float]) -> float:
    """Return half the width of the median's 95 % confidence interval, 1.57 IQR / sqrt(n); inf for fewer than 2 values.

    Source: McGill, Tukey, Larsen 1978, "Variations of box plots".
    """
    if len(values) < 2:
        return inf
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return 1.57 * (upper - lower) / sqrt(len(values))
