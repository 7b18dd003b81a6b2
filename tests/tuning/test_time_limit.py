"""Time limits: the answer says what was left out, and the next run with more time makes up for it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, fake_machine, linear
from support.clock.two_algorithms import BATCH, Bench
from support.snapshots import assert_as_stored, printed

from mucudnn.bench.analyses.tuning_report import tuning_record, tuning_table
from mucudnn.bench.sources.table_tuning import TableTuning, TunedLayer
from mucudnn.database.database import Database
from mucudnn.optimizing.report import Report
from mucudnn.tuning.result import LeftOut, TunedProblem, Tuning
from mucudnn.tuning.tuner import tune
from mucudnn.words.config import Config
from mucudnn.words.results import MicroConfig

SIZES = (1, 2, 4, 8)
NO_LIMIT = Config(workspace_limit=None, thorough=True)
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
    assert tuned.left_out.unmeasured == tuple(MicroConfig("quick", size) for size in SIZES)
    assert not bench.quick.sizes_run
    assert tuned.reason.endswith("; of what was measured within the time limit")
    expected = "time limit: 4 of 8 candidates were not measured (quick): give it more"
    assert expected in str(tuned)
    assert expected in str(Report((("conv", tuned),)))


def test_the_same_without_a_limit_leaves_out_nothing(bench: Bench) -> None:
    for config in (NO_LIMIT, replace(NO_LIMIT, time_limit=1e6)):
        tuned = short(bench, config)
        assert tuned.left_out == LeftOut()
        assert tuned.configuration.algorithms == ("quick",)
        assert "time limit" not in str(tuned)
        bench.database = Database(":memory:")


def test_the_next_run_with_time_enough_measures_what_was_left_out(bench: Bench) -> None:
    assert short(bench, HURRIED).configuration.is_baseline
    ran = len(bench.native.sizes_run)
    tuned = short(bench, NO_LIMIT)
    assert tuned.configuration.algorithms == ("quick",)
    assert tuned.left_out == LeftOut()
    assert len(bench.native.sizes_run) == ran  # only what was left out
    steps = bench.steps
    assert short(bench, NO_LIMIT).left_out == LeftOut()
    assert bench.steps == steps


def test_each_run_within_the_limit_goes_on_where_the_last_one_ended(bench: Bench) -> None:
    config, left = replace(NO_LIMIT, time_limit=0.05), []
    while not left or left[-1]:
        left.append(len(short(bench, config).left_out.unmeasured))
        assert len(left) < 9
    assert left == sorted(left, reverse=True)
    assert len(set(left)) == len(left) > 2


def test_what_the_race_drops_and_what_fails_is_not_left_out(bench: Bench) -> None:
    hopeless = FakeAlgorithm("hopeless", bench.clock, linear(0.5), scratch_bytes_per_sample=1)
    failing = FakeAlgorithm("failing", bench.clock, linear(0.01), failing_sizes=SIZES)
    inexact = FakeAlgorithm("inexact", bench.clock, linear(0.001), error=0.01)
    too_large = FakeAlgorithm("large", bench.clock, linear(0.001), prepared_bytes=10**6)
    algorithms = [bench.native, bench.quick, hopeless, failing, inexact, too_large]
    config, machine = Config(workspace_limit=1000, time_limit=1e6, thorough=True), fake_machine(bench.clock, algorithms)
    (tuned,) = tune([FORWARD], BATCH, config, database=bench.database, machine=machine).problems
    assert MicroConfig("hopeless", 8) not in {m.micro_config for m in tuned.measurements}
    assert tuned.left_out == LeftOut()


def test_fewer_samples_than_usual_are_told(bench: Bench) -> None:
    """There is time for a first sample of each, and none for a second."""
    limits = (tenths / 10 for tenths in range(1, 100))
    tuned = next(found for limit in limits if not (found := afresh(bench, limit)).left_out.unmeasured)
    few = {m.micro_config for m in tuned.measurements if m.samples < 3}
    assert tuned.left_out.hurried
    assert set(tuned.left_out.hurried) <= few
    assert f"time limit: {len(tuned.left_out.hurried)} measured with fewer samples than usual" in str(tuned)
    assert "of what was measured" not in tuned.reason


def afresh(bench: Bench, limit: float) -> TunedProblem:
    bench.database = Database(":memory:")
    return short(bench, replace(NO_LIMIT, time_limit=limit))


def table(tuned: TunedProblem) -> TableTuning:
    tuned = replace(tuned, relative_error=2e-8)  # else it depends on the machine
    return TableTuning(
        "mynet", HURRIED, ENVIRONMENT, (TunedLayer(("one",), 1, tuned), TunedLayer(("two",), 2, whole(tuned))), 2
    )


def whole(tuned: TunedProblem) -> TunedProblem:
    return replace(tuned, left_out=LeftOut())


def test_tables_records_and_frames_have_it(bench: Bench) -> None:
    tuned = short(bench, HURRIED)
    assert_as_stored("tune-time-limit", tuning_table(table(tuned)))
    one, two = json.loads(json.dumps(tuning_record(table(tuned))))["problems"]
    assert one["unmeasured"] == [{"algorithm": "quick", "micro_batch_size": size} for size in SIZES]
    assert (two["unmeasured"], two["hurried"]) == ([], [])
    frame = Tuning(HURRIED, ENVIRONMENT, (tuned, whole(tuned))).to_frame()
    assert list(frame.unmeasured) == [4, 0]
    assert tuned.to_json()["left_out"]["unmeasured"]


def test_where_nothing_is_left_out_tables_have_no_such_column(bench: Bench) -> None:
    complete = table(whole(short(bench, NO_LIMIT)))
    assert "not measured" not in printed(tuning_table(complete))
