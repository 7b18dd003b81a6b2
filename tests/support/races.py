"""Races of algorithms whose costs are known, by a clock that they move."""

from __future__ import annotations

from support.clock.machine import FORWARD, FakeAlgorithm, FakeClock, linear

from mucudnn.measuring.candidates import find_candidates
from mucudnn.measuring.race import RaceJob
from mucudnn.measuring.thorough_race import ThoroughRace
from mucudnn.words.results import Failure, Measurement

SIZES = (1, 2, 4, 8)
CLOCK = FakeClock()


def fake(name: str, seconds_per_sample: float = 0.01, **settings: object) -> FakeAlgorithm:
    return FakeAlgorithm(name, CLOCK, linear(seconds_per_sample), **settings)


def job_of(*algorithms: FakeAlgorithm, known: tuple[Measurement, ...] = (), **bounds: object) -> RaceJob:
    candidates, _ = find_candidates(FORWARD, algorithms, SIZES, known)
    return RaceJob(FORWARD, max(SIZES), candidates, known, clock=CLOCK, **bounds)


def race_of(*algorithms: FakeAlgorithm, **bounds: object) -> ThoroughRace:
    return ThoroughRace(job_of(*algorithms, **bounds))


def results_of(*algorithms: FakeAlgorithm, **bounds: object) -> dict[tuple[str, int], Measurement | Failure]:
    found = race_of(*algorithms, **bounds).measure()
    return {(r.micro_config.algorithm, r.micro_config.micro_batch_size): r for r in found}
