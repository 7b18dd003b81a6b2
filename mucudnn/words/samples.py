"""Raw samples: the single timings that a measurement or a whole run is made of, and the processor meanwhile.

They stand beside the results (``results.py``) and not in their numbers: who chooses reads medians, who judges a median
reads its samples.
"""

from __future__ import annotations

from dataclasses import dataclass


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
