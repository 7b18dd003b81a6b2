"""Profiling jobs of algorithms whose costs are known, by a clock that they move."""

from __future__ import annotations

from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, linear

from mucudnn.measuring.candidates import find_candidates
from mucudnn.measuring.profiler import ProfilingJob
from mucudnn.words.results import Failure, Measurement

SIZES = (1, 2, 4, 8)
CLOCK = FakeClock()


def fake(name: str, seconds_per_sample: float = 0.01, **settings: object) -> FakeAlgorithm:
    return FakeAlgorithm(name, CLOCK, linear(seconds_per_sample), **settings)


def job_of(*algorithms: FakeAlgorithm, known: tuple[Measurement, ...] = (), **bounds: object) -> ProfilingJob:
    candidates, _ = find_candidates(FORWARD, algorithms, SIZES, known)
    return ProfilingJob(FORWARD, max(SIZES), candidates, known, clock=CLOCK, **bounds)


def results_of(*algorithms: FakeAlgorithm, **bounds: object) -> dict[tuple[str, int], Measurement | Failure]:
    found = job_of(*algorithms, **bounds).measure()
    return {(r.micro_config.algorithm, r.micro_config.micro_batch_size): r for r in found}
