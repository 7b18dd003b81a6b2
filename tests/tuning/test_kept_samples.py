"""What tuning keeps of its samples: every number beside them can be computed from them again."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest
from support.clock.busy_bench import BusyBench
from support.clock.machine import ENVIRONMENT, FORWARD
from support.clock.shared_machine import SharedProcessors
from support.clock.two_algorithms import NO_LIMIT, Bench

from mucudnn.database.database import Database
from mucudnn.database.samples import unpacked
from mucudnn.database.schema import Row
from mucudnn.measuring.timing.timer import relative_spread
from mucudnn.tuning.tuner import Tuning
from mucudnn.words.config import Config
from mucudnn.words.samples import uncertainty

THOROUGH = Config(workspace_limit=None, thorough=True)


class NoisyBench(Bench):
    """Its calls take up to twice as long, at random; ``drawn``: seconds of each step of quick, in order."""

    def __init__(self) -> None:
        draw = random.Random(1)
        super().__init__(slowdown=lambda _: draw.uniform(1.0, 2.0))
        self.drawn: list[float] = []
        self.native.step_s = lambda size: draw.uniform(0.02, 0.04) * size
        self.quick.step_s, self.quick.setup_s = self._noted(draw), 0.003

    def _noted(self, draw: random.Random) -> Callable[[int], float]:
        def step_s(size: int) -> float:
            self.drawn.append(draw.uniform(0.01, 0.02) * size)
            return self.drawn[-1]

        return step_s


def rows_of(kind: str, database: Database) -> list[Row]:
    return [row for row in database.every_row() if row["kind"] == kind]


@pytest.fixture(params=[NO_LIMIT, THOROUGH], ids=["quick", "thorough"])
def noisy(request: pytest.FixtureRequest) -> NoisyBench:
    bench = NoisyBench()
    bench.tune(config=request.param)
    return bench


def test_every_measurement_can_be_computed_from_its_samples(noisy: NoisyBench) -> None:
    measurements = rows_of("measurement", noisy.database)
    assert {row["algorithm"] for row in measurements} == {"native", "quick"}
    for row in measurements:
        steps, setups = (unpacked(row[name]) for name in ("step_samples_s", "setup_samples_s"))
        assert len(steps) == row["samples"]
        assert row["step_s"] == median(steps)
        assert row["noise"] == relative_spread(steps)
        assert row["setup_s"] == median(setups)
    assert max(row["noise"] for row in measurements) > 0


def test_every_whole_run_can_be_computed_from_its_samples_round_by_round(noisy: NoisyBench) -> None:
    runs = rows_of("verification", noisy.database)
    assert runs
    for row in runs:
        baseline, times = (unpacked(row[name]) for name in ("baseline_samples_s", "time_samples_s"))
        assert row["baseline_s"] == median(baseline)
        assert row["time_s"] == median(times)
        ratios = [b / t for b, t in zip(baseline, times, strict=True)]
        assert row["noise"] == uncertainty(ratios) > 0


def test_what_the_processors_did_meanwhile_is_kept() -> None:
    bench = BusyBench(SharedProcessors(stolen=0.5, hz=2.4e9))
    bench.processors.work(1.0)
    bench.tune()
    rows = [row for row in bench.database.every_row() if row["kind"] in ("measurement", "verification")]
    assert {row["clock_hz"] for row in rows} == {2.4e9}
    shares = [row["stolen"] for row in rows]
    assert shares == [pytest.approx(0.25)] * len(rows)


def test_measurements_to_choose_from_carry_no_samples(noisy: NoisyBench) -> None:
    tuning: Tuning = noisy.tune()
    assert all(measured.raw is None for tuned in tuning.problems for measured in tuned.measurements)
    versions = {"native": 1, "quick": 1}
    stored = noisy.database.measurements_of_all(ENVIRONMENT, [FORWARD], versions)[FORWARD]
    assert stored
    assert all(measured.raw is None for measured in stored)
