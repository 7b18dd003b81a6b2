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
from mucudnn.tuning.standings import Standings, failures_within

SIZES = (1, 2, 4, 8)
CLOCK = FakeClock()


def fake(name: str, seconds_per_sample: float = 0.01, **settings: object) -> FakeAlgorithm:
    return FakeAlgorithm(name, CLOCK, linear(seconds_per_sample), **settings)


def standings_of(
    *algorithms: FakeAlgorithm,
    stored: Sequence[Measurement | Failure] = (),
    limit_bytes: int | None = None,
    baseline_exempt: bool = False,
    **settings: Any,
) -> Standings:
    """Return the table of a race of these algorithms, with the results of an earlier one."""
    known = [result for result in stored if isinstance(result, Measurement)]
    candidates, _ = find_candidates(FORWARD, algorithms, SIZES, known)
    return Standings(
        task=Task(FORWARD, max(SIZES), limit_bytes, baseline_exempt=baseline_exempt),
        candidates=candidates,
        known={m.micro_config: m for m in known},
        failed=failures_within((result for result in stored if isinstance(result, Failure)), limit_bytes),
        **settings,
    )


def race_on(problem: ConvProblem, batch_size: int, candidates: Sequence[Candidate], clock: FakeClock) -> Race:
    return Race(Standings(Task(problem, batch_size), candidates), Machine(ENVIRONMENT, (), clock=clock))


def race_of(*algorithms: FakeAlgorithm, time_limit_s: float | None = None, **settings: Any) -> Race:
    return Race(standings_of(*algorithms, **settings), Machine(ENVIRONMENT, algorithms, clock=CLOCK), time_limit_s)


def results_of(*algorithms: FakeAlgorithm, **settings: Any) -> dict[tuple[str, int], Measurement | Failure]:
    found = race_of(*algorithms, **settings).measure()
    return {(r.micro_config.algorithm, r.micro_config.micro_batch_size): r for r in found}
