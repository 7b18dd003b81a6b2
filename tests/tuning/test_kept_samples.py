"""What tuning stores of its samples, and reports of time limits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, fake_machine, linear
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench
from support.snapshots import assert_as_stored, printed

from mucudnn.bench.results.tuning_report import tuning_record, tuning_table
from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer
from mucudnn.core.answers import TunedProblem
from mucudnn.core.config import Config
from mucudnn.core.records import MicroConfig
from mucudnn.core.statistics import spread, uncertainty
from mucudnn.optimizing.report import Report
from mucudnn.store.database import Database
from mucudnn.store.schema import Row, unpacked
from mucudnn.tuning.result import Tuning
from mucudnn.tuning.tuner import tune


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


@pytest.fixture
def noisy() -> NoisyBench:
    bench = NoisyBench()
    bench.tune()
    return bench


def test_every_measurement_can_be_computed_from_its_samples(noisy: NoisyBench) -> None:
    measurements = rows_of("measurement", noisy.database)
    assert {row["algorithm"] for row in measurements} == {"native", "quick"}
    for row in measurements:
        steps, setups = (unpacked(row[name]) for name in ("step_samples_s", "setup_samples_s"))
        assert len(steps) == row["samples"]
        assert row["step_s"] == (median(steps) if len(steps) > 2 else min(steps))
        assert row["noise"] == spread(steps)
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


def test_measurements_to_choose_from_carry_no_samples(noisy: NoisyBench) -> None:
    tuning: Tuning = noisy.tune()
    assert all(not measured.step_samples_s for tuned in tuning.problems for measured in tuned.measurements)
    versions = {"native": 1, "quick": 1}
    stored = noisy.database.measurements_of_all(ENVIRONMENT, [FORWARD], versions)[FORWARD]
    assert stored
    assert all(not measured.step_samples_s for measured in stored)


# Time limits: the answer says what was left out, and the next run with more time makes up for it.


SIZES = (1, 2, 4, 8)
HURRIED = replace(NO_LIMIT, time_limit=1e-3)


@pytest.fixture
def bench() -> Bench:
    """``quick`` is four times as fast as torch's own, and looked at after it."""
    made = Bench()
    made.native.step_s, made.quick.step_s = linear(0.04), linear(0.01)
    return made


def short(bench: Bench, config: Config) -> TunedProblem:
    return bench.tune(config=config)[FORWARD]


def test_what_the_limit_left_out_is_told(bench: Bench) -> None:
    tuned = short(bench, HURRIED)
    measured = {m.micro_config for m in tuned.measurements}
    assert measured == {MicroConfig("native", BATCH)}
    assert tuned.left_out == (MicroConfig("quick", BATCH),)
    assert tuned.reason.endswith("; of what was measured within the time limit")
    expected = "time limit: 1 of 2 candidates were not measured (quick): give it more"
    assert expected in str(tuned)
    assert expected in str(Report((("conv", tuned),)))


def test_the_same_without_a_limit_leaves_out_nothing(bench: Bench) -> None:
    for config in (NO_LIMIT, replace(NO_LIMIT, time_limit=1e6)):
        tuned = short(bench, config)
        assert tuned.left_out == ()
        assert tuned.configuration.algorithms == ("quick",)
        assert "time limit" not in str(tuned)
        bench.database = Database(":memory:")


def test_the_next_run_with_time_enough_measures_what_was_left_out(bench: Bench) -> None:
    assert short(bench, HURRIED).configuration.is_baseline
    ran = [size for size in bench.native.sizes_run if size in (1, BATCH)]
    tuned = short(bench, NO_LIMIT)
    assert tuned.configuration.algorithms == ("quick",)
    assert tuned.left_out == ()
    assert [size for size in bench.native.sizes_run if size in (1, BATCH)] == ran  # only what was left out
    steps = bench.steps
    assert short(bench, NO_LIMIT).left_out == ()
    assert bench.steps == steps


def test_each_run_within_the_limit_goes_on_where_the_last_one_ended(bench: Bench) -> None:
    config = replace(NO_LIMIT, time_limit=0.05)
    runs = [short(bench, config) for _ in range(6)]
    assert [len(tuned.measurements) + len(tuned.left_out) for tuned in runs][-1] == 5  # torch's own, and each size
    measured = [len(tuned.measurements) for tuned in runs]
    assert (measured, runs[-1].left_out) == ([1, 2, 3, 4, 5, 5], ())


def test_what_the_race_drops_and_what_fails_is_not_left_out(bench: Bench) -> None:
    hopeless = FakeAlgorithm("hopeless", bench.clock, linear(0.5), scratch_bytes_per_sample=1)
    failing = FakeAlgorithm("failing", bench.clock, linear(0.01), failing_sizes=SIZES)
    inexact = FakeAlgorithm("inexact", bench.clock, linear(0.001), error=0.01)
    too_large = FakeAlgorithm("large", bench.clock, linear(0.001), prepared_bytes=10**6)
    algorithms = [bench.native, bench.quick, hopeless, failing, inexact, too_large]
    config, machine = Config(workspace_limit=1000, time_limit=1e6), fake_machine(bench.clock, algorithms)
    (tuned,) = tune([FORWARD], BATCH, config, database=bench.database, machine=machine).problems
    assert MicroConfig("hopeless", 8) not in {m.micro_config for m in tuned.measurements}
    assert tuned.left_out == ()


def table(tuned: TunedProblem) -> TableTuning:
    tuned = replace(tuned, relative_error=2e-8)  # else it depends on the machine
    return TableTuning(
        "mynet", HURRIED, ENVIRONMENT, (TunedLayer(("one",), 1, tuned), TunedLayer(("two",), 2, whole(tuned))), 2
    )


def whole(tuned: TunedProblem) -> TunedProblem:
    return replace(tuned, left_out=())


def test_tables_records_and_frames_have_it(bench: Bench) -> None:
    tuned = short(bench, HURRIED)
    assert_as_stored("tune-time-limit", tuning_table(table(tuned)))
    one, two = json.loads(json.dumps(tuning_record(table(tuned))))["problems"]
    assert {of["algorithm"] for of in one["unmeasured"]} == {"quick"}
    assert two["unmeasured"] == []
    frame = Tuning(HURRIED, ENVIRONMENT, (tuned, whole(tuned))).to_frame()
    assert list(frame.unmeasured) == [1, 0]
    assert tuned.to_json()["left_out"]


def test_where_nothing_is_left_out_tables_have_no_such_column(bench: Bench) -> None:
    complete = table(whole(short(bench, NO_LIMIT)))
    assert "not measured" not in printed(tuning_table(complete))


@pytest.mark.parametrize("step_s", [0.001, 0.2])
def test_a_tuning_takes_the_time_limit_of_each_problem_and_a_fifth_more_at_most(step_s: float) -> None:
    """Whatever a call takes, as long as PyTorch's own can be measured and compared within the limit."""
    bench = Bench()
    others = [FakeAlgorithm(f"other{i}", bench.clock, linear(step_s * (1 + i / 20))) for i in range(8)]
    bench.native.step_s, bench.quick.step_s = linear(step_s), linear(step_s / 2)
    machine = fake_machine(bench.clock, [bench.native, bench.quick, *others])
    problems = [replace(FORWARD, c=1 + i) for i in range(5)]
    limit_s = 40 * BATCH * step_s
    config = Config(workspace_limit=None, time_limit=limit_s, policy="all")
    tuning = tune(problems, BATCH, config, database=bench.database, machine=machine)
    assert bench.clock.seconds <= len(problems) * limit_s * 1.2
    assert any(tuned.configuration.algorithms == ("quick",) for tuned in tuning.problems)
