"""Raw samples: the individual timings behind a measurement or a whole run.

Samples are kept apart from the results (``results.py``): choices need only medians; samples show how good a median is.
"""

from __future__ import annotations

from dataclasses import dataclass


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
