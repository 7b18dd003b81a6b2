"""Tuning from end to end, on a machine whose costs are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, fake_machine, linear
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench

from mucudnn.core.config import Config
from mucudnn.core.errors import InfeasibleError, InvalidInputError
from mucudnn.core.records import Configuration, Failure, FailureKind, MicroConfig
from mucudnn.store.database import Database
from mucudnn.tuning.tuner import TuningInterrupted, tune

OTHER = replace(FORWARD, k=3)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_fastest_is_chosen_and_verified(bench: Bench) -> None:
    tuned = bench.tune()[FORWARD]
    assert tuned.configuration.algorithms == ("quick",)
    assert tuned.configuration.batch_size == BATCH
    assert tuned.speedup == pytest.approx(2.0)
    assert tuned.time_s == pytest.approx(tuned.configuration.time_s)
    assert tuned.reason.startswith("fastest in whole runs")


@pytest.mark.parametrize(("slowdown", "is_chosen"), [(1.96, False), (1.90, True)])
def test_a_lead_below_three_percent_is_not_worth_it(slowdown: float, is_chosen: bool) -> None:
    """The machine has no noise at all: only the least gain decides. ``quick`` is twice as fast as torch by itself."""
    bench = Bench(slowdown=lambda configuration: 1.0 if configuration.is_baseline else slowdown)
    tuned = bench.tune()[FORWARD]
    assert tuned.configuration.is_baseline is not is_chosen
    assert ("not faster by more than the noise" in tuned.reason) is not is_chosen


@pytest.mark.parametrize(("limit", "workspace"), [(180, 180), (179, 140), (110, 110)])
def test_the_limit_is_kept_and_used_to_the_last_byte(bench: Bench, limit: int, workspace: int) -> None:
    bench.quick.step_s = linear(0.01, 0.001)
    chosen = bench.tune(config=Config(workspace_limit=limit))[FORWARD].configuration
    assert chosen.workspace_bytes == workspace


def test_torch_over_the_limit_is_not_chosen_even_if_it_is_faster(bench: Bench) -> None:
    bench.native.scratch_bytes_per_sample = 1000
    bench.quick.step_s = linear(0.03)
    tuned = bench.tune(config=Config(workspace_limit=200))[FORWARD]
    assert tuned.configuration.algorithms == ("quick",)
    assert tuned.speedup < 1
    assert "within the limit" in tuned.reason


def test_torch_over_the_default_limit_runs_where_it_is_faster(bench: Bench) -> None:
    bench.native.scratch_bytes_per_sample = 10 * 2**20  # more than the default limit for 8 samples
    bench.quick.step_s = linear(0.03)
    assert bench.tune(config=Config())[FORWARD].configuration.is_baseline
    assert bench.tune(config=Config(workspace_limit=200))[FORWARD].configuration.algorithms == ("quick",)


def test_where_a_small_limit_needs_pieces_that_the_race_leaves_out_all_are_measured(bench: Bench) -> None:
    """Batch 8 in pieces of 4 and less: nothing but torch's own, in ones, is within the limit."""
    bench.native.scratch_bytes_per_sample = 50
    bench.native.unsupported_sizes = (2, 4)
    tuned = bench.tune(config=Config(workspace_limit=60))[FORWARD]
    assert [m.micro_batch_size for m in tuned.configuration.micro_configs] == [1] * 8


@pytest.mark.parametrize("failing_sizes", [(1, 2, 4, 8), (8,)])
def test_what_was_passed_over_is_measured_where_nothing_else_runs(bench: Bench, failing_sizes: Sequence[int]) -> None:
    """And torch's own, in pieces, where only its undivided call fails."""
    passed = Failure(MicroConfig("quick", BATCH), "3.0 times the fastest in like problems", FailureKind.HOPELESS)
    bench.database.add_failure(ENVIRONMENT, FORWARD, 1, passed)
    assert bench.tune()[FORWARD].configuration.is_baseline
    assert not bench.quick.sizes_run
    bench.database = Database(":memory:")
    bench.database.add_failure(ENVIRONMENT, FORWARD, 1, passed)
    bench.native.failing_sizes = failing_sizes
    tuned = bench.tune()[FORWARD]
    assert tuned.configuration.algorithms == ("quick",)
    measured = {m.micro_config.micro_batch_size for m in tuned.measurements if m.micro_config.algorithm == "native"}
    assert measured == {1, 2, 4, 8} - {*failing_sizes}


def test_the_error_bound_bars_an_algorithm(bench: Bench) -> None:
    bench.quick.error = 1e-4
    assert bench.tune()[FORWARD].configuration.algorithms == ("native",)
    loose = replace(NO_LIMIT, max_relative_error=1e-3)
    tuned = bench.tune(config=loose)[FORWARD]
    assert tuned.configuration.algorithms == ("quick",)
    assert tuned.relative_error == pytest.approx(1e-4, rel=1e-2)


def test_only_the_named_algorithms_and_torch_are_run(bench: Bench) -> None:
    tuned = bench.tune(config=replace(NO_LIMIT, algorithms=("native",)))[FORWARD]
    assert tuned.configuration.is_baseline
    assert not bench.quick.sizes_run
    with pytest.raises(InvalidInputError, match="has fft; this machine has native, quick"):
        bench.tune(config=replace(NO_LIMIT, algorithms=("fft",)))


def test_only_algorithms_that_give_the_same_bits_are_run_where_that_is_asked_for(bench: Bench) -> None:
    bench.quick.deterministic = False
    assert bench.tune(config=replace(NO_LIMIT, deterministic=True))[FORWARD].configuration.is_baseline
    assert not bench.quick.sizes_run
    assert bench.tune()[FORWARD].configuration.algorithms == ("quick",)


def test_only_algorithms_that_spoil_no_more_than_torch_are_run_where_that_is_asked_for(bench: Bench) -> None:
    bench.quick.local = bench.native.local = False
    strict = replace(NO_LIMIT, strict=True)
    tuned = bench.tune(config=strict)[FORWARD]
    assert tuned.configuration.is_baseline
    assert {m.micro_config.algorithm for m in tuned.measurements} == {"native"}  # torch's own is, whatever it declares
    assert not bench.quick.sizes_run
    assert bench.tune()[FORWARD].configuration.algorithms == ("quick",)
    assert bench.tune(config=strict)[FORWARD].configuration.is_baseline


@pytest.mark.parametrize("config", [NO_LIMIT, Config(workspace_budget=360)])
def test_the_second_run_measures_nothing_and_gives_the_same(bench: Bench, config: Config) -> None:
    first = bench.tune(FORWARD, OTHER, config=config)
    steps, seconds = bench.steps, bench.clock.now()
    second = bench.tune(FORWARD, OTHER, config=config)
    assert (bench.steps, bench.clock.now()) == (steps, seconds)
    assert [str(tuned) for tuned in second.problems] == [str(tuned) for tuned in first.problems]
    assert all("whole runs, speedup 2.00" in tuned.reason for tuned in first.problems)


def test_interrupted_tuning_has_what_is_ready_and_is_resumed(bench: Bench) -> None:
    def interrupt(text: str, fraction: float) -> None:
        if str(OTHER) in text and "measuring" in text:
            raise KeyboardInterrupt

    with pytest.raises(TuningInterrupted) as caught:
        tune([FORWARD, OTHER], BATCH, NO_LIMIT, database=bench.database, machine=bench.machine, progress=interrupt)
    assert [tuned.problem for tuned in caught.value.partial.problems] == [FORWARD]
    expected = bench.steps
    bench.tune(FORWARD)
    assert bench.steps == expected
    assert len(bench.tune(FORWARD, OTHER).problems) == 2


def test_measurements_are_stored_as_they_are_made(bench: Bench) -> None:
    def interrupt(text: str, fraction: float) -> None:
        if text.endswith("quick 1"):
            raise KeyboardInterrupt

    with pytest.raises(TuningInterrupted):
        tune([FORWARD], BATCH, NO_LIMIT, database=bench.database, machine=bench.machine, progress=interrupt)
    stored = bench.database.measurements(ENVIRONMENT, FORWARD, {"quick": 1})
    assert 1 in {m.micro_config.micro_batch_size for m in stored}


@pytest.mark.parametrize(("name", "smallest"), [("workspace_limit", 50), ("workspace_budget", 100)])
def test_what_is_infeasible_is_found_before_measuring_and_names_every_problem(
    bench: Bench, name: str, smallest: int
) -> None:
    bench.native.scratch_bytes_per_sample = 50
    with pytest.raises(InfeasibleError) as caught:
        bench.tune(FORWARD, OTHER, config=Config(**{name: smallest - 1}))  # type: ignore[arg-type]
    for part in (str(FORWARD), str(OTHER), "at least 50B"):
        assert part in str(caught.value)
    assert caught.value.smallest_feasible_bytes == smallest
    assert bench.steps == 0
    assert len(bench.tune(FORWARD, OTHER, config=Config(**{name: smallest})).problems) == 2  # type: ignore[arg-type]


def test_failures_are_part_of_the_result_and_of_feasibility(bench: Bench) -> None:
    bench.native.scratch_bytes_per_sample = 50
    bench.quick.failing_sizes = (1, 2, 4, 8)
    bench.native.failing_sizes = (1,)
    tuned = bench.tune(config=Config(workspace_budget=10**6))[FORWARD]  # for which torch's own runs in pieces, too
    assert {f.micro_config.algorithm for f in tuned.failures} == {"native", "quick"}
    with pytest.raises(InfeasibleError, match="at least 100B"):
        bench.tune(config=Config(workspace_limit=99))


def test_smaller_batches_have_configurations_of_the_same_sweep(bench: Bench) -> None:
    tuning = bench.tune(config=Config(workspace_limit=150))
    configurations = tuning.configurations(FORWARD)
    assert set(configurations) == set(range(1, BATCH + 1))
    assert configurations[BATCH] == tuning[FORWARD].configuration
    for n, configuration in configurations.items():
        assert configuration.batch_size == n
        assert configuration.workspace_bytes <= 150
    with pytest.raises(InvalidInputError, match="is not in this tuning"):
        tuning.configurations(OTHER)


def test_only_what_is_predicted_within_seven_percent_of_the_fastest_runs_whole(bench: Bench) -> None:
    """``near`` is predicted to take a tenth longer than the fastest."""
    near, run = FakeAlgorithm("near", bench.clock, linear(0.011)), set[str]()

    def seen(configuration: Configuration) -> float:
        run.update(configuration.algorithms)
        return 1.0

    machine = fake_machine(bench.clock, [bench.native, bench.quick, near], seen)
    config = Config(workspace_limit=None, policy="undivided")
    tune([FORWARD], BATCH, config, database=bench.database, machine=machine)
    assert run == {"quick"}


def budget(size: int) -> Config:
    return Config(workspace_budget=size)


@pytest.mark.parametrize(("size", "workspaces"), [(360, [180, 180]), (359, [140, 180]), (110, [0, 110]), (109, [0, 0])])
def test_a_budget_is_divided_over_all_problems(bench: Bench, size: int, workspaces: list[int]) -> None:
    bench.quick.step_s = linear(0.01, 0.001)
    tuning = bench.tune(FORWARD, OTHER, config=budget(size))
    assert sorted(tuned.configuration.workspace_bytes for tuned in tuning.problems) == workspaces
    assert tuning.division is not None
    assert tuning.division.workspace_bytes == sum(workspaces)
    assert "optimal" in str(tuning)
    assert json.loads(json.dumps(tuning.to_json()))["division"]["budget_bytes"] == size


def test_a_limit_beside_a_budget_and_headroom_without_a_model_are_refused(bench: Bench) -> None:
    with pytest.raises(InvalidInputError, match="give one of the two"):
        Config(workspace_limit="1MiB", workspace_budget="2MiB")
    with pytest.raises(InvalidInputError, match="needs a model"):
        bench.tune(config=Config(workspace_limit="headroom"))


def test_batches_of_more_elements_than_libraries_count_are_refused_on_the_cpu(bench: Bench) -> None:
    large = replace(FORWARD, c=2**10, h=2**10, w=2**10)
    with pytest.raises(InvalidInputError, match="batch_size is 2; it must be at most 1 on device 'cpu'"):
        tune([large], 2, NO_LIMIT, database=bench.database, machine=bench.machine)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"problems": None}, "one of problems is None"),
        ({"problems": ["forward"]}, "one of problems is 'forward'; it must be a ConvProblem"),
        (
            {"config": {"workspace_limit": None}},
            r"config is {'workspace_limit': None}; give mucudnn.Config\(\*\*config\)",
        ),
        ({"config": "64MiB"}, "config is '64MiB'; give a mucudnn.Config"),
        ({"device": "gpu"}, "device is 'gpu'; use 'cpu', 'cuda', 'cuda:1' or a torch.device"),
        ({"device": 0}, "device is 0; use 'cpu'"),
        ({"names": ["a"]}, r"names is \['a'\]; it must be a Mapping"),
        ({"machine": 5}, "machine is 5; it must be a Machine"),
        ({"progress": 3}, "progress is 3; give a function of a text and a fraction"),
        ({"database": "measurements.sqlite"}, "database is 'measurements.sqlite'; it must be a Database"),
    ],
)
def test_other_arguments_that_cannot_be_are_refused(bench: Bench, given: dict[str, Any], message: str) -> None:
    usual = {"problems": [FORWARD], "batch_size": BATCH, "config": NO_LIMIT}
    with pytest.raises(InvalidInputError, match=message):
        tune(**(usual | {"database": bench.database, "machine": bench.machine} | given))
    assert bench.steps == 0
