"""Races of algorithms whose costs are known, by a clock that they move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, FakeClock, linear

from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Failure, Measurement, Task
from mucudnn.measuring.candidates import Candidate, find_candidates
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.race import Race

SIZES = (1, 2, 4, 8)
CLOCK = FakeClock()


def fake(name: str, seconds_per_sample: float = 0.01, **settings: object) -> FakeAlgorithm:
    return FakeAlgorithm(name, CLOCK, linear(seconds_per_sample), **settings)


def given_of(
    *algorithms: FakeAlgorithm,
    stored: tuple[Measurement, ...] = (),
    limit_bytes: int | None = None,
    baseline_exempt: bool = False,
    **bounds: object,
) -> dict[str, Any]:
    """Return the arguments of a race."""
    candidates, _ = find_candidates(FORWARD, algorithms, SIZES, stored)
    task = Task(FORWARD, max(SIZES), limit_bytes, baseline_exempt=baseline_exempt)
    machine = Machine(ENVIRONMENT, algorithms, clock=CLOCK)
    return {"task": task, "candidates": candidates, "machine": machine, "stored": stored, **bounds}


def race_on(problem: ConvProblem, batch_size: int, candidates: Sequence[Candidate], clock: FakeClock) -> Race:
    return Race(Task(problem, batch_size), candidates, Machine(ENVIRONMENT, (), clock=clock))


def race_of(*algorithms: FakeAlgorithm, **bounds: object) -> Race:
    return Race(**given_of(*algorithms, **bounds))


def results_of(*algorithms: FakeAlgorithm, **bounds: object) -> dict[tuple[str, int], Measurement | Failure]:
    found = race_of(*algorithms, **bounds).measure()
    return {(r.micro_config.algorithm, r.micro_config.micro_batch_size): r for r in found}
