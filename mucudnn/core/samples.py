"""Raw samples: the individual timings behind a measurement or a whole run.

Samples are kept apart from the results (``results.py``): choices need only medians; samples show how good a median is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import quantiles


@dataclass(frozen=True, slots=True)
class MeasuredSamples:
    """Samples of a measurement in chronological order: seconds of the algorithm's setups and of its steps."""

    setup_samples_s: tuple[float, ...]
    step_samples_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PairedSamples:
    """Timings of a configuration's complete calls and its baseline's, in seconds; same index means same round."""

    baseline_samples_s: tuple[float, ...]
    time_samples_s: tuple[float, ...]

    @property
    def speedups(self) -> list[float]:
        """Time of the baseline / time of the run, by round; slowdowns of the machine affect both times and cancel."""
        return [b / t for b, t in zip(self.baseline_samples_s, self.time_samples_s, strict=True)]


def uncertainty(values: Sequence[float]) -> float:
    """Return half the width of the median's 95 % confidence interval, 1.57 IQR / sqrt(n); inf for fewer than 2 values.

    Source: McGill, Tukey, Larsen 1978, "Variations of box plots".
    """
    if len(values) < 2:
        return inf
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return 1.57 * (upper - lower) / sqrt(len(values))
