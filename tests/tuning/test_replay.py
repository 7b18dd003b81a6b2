"""Solving again from stored measurements, those of missing packages included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, FakeClock, fake_machine, linear
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench
from support.plug_in import Pointwise

import mucudnn
from mucudnn.core.config import BatchSizePolicy, Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.problem import ConvProblem
from mucudnn.core.records import Configuration, Task
from mucudnn.kernels import registry
from mucudnn.store.database import Database
from mucudnn.tuning.replay import SelectedMeasurements, replay, select_measurements
from mucudnn.tuning.result import Tuning
from mucudnn.tuning.tuner import tune, tune_tasks

VERSIONS = {"native": 1, "quick": 1}
PROBLEMS = [replace(FORWARD, k=k) for k in (2, 3, 4)]


def stored(database: Database, tasks: Sequence[Task], versions: Mapping[str, int] = VERSIONS) -> SelectedMeasurements:
    found = {task: (ENVIRONMENT, task.problem, versions) for task in tasks}
    measurements = {task: database.measurements(*key) for task, key in found.items()}
    runs = {task: database.whole_runs(*key) for task, key in found.items()}
    return SelectedMeasurements(ENVIRONMENT, versions, measurements, runs)


def tasks(config: Config) -> list[Task]:
    return [Task(p, BATCH, config.workspace_limit_bytes, count=i + 1, name=f"n{i}") for i, p in enumerate(PROBLEMS)]


def tuned(config: Config, database: Database) -> Tuning:
    clock = FakeClock()
    native = FakeAlgorithm("native", clock, linear(0.02))
    quick = FakeAlgorithm("quick", clock, linear(0.01, 0.001), prepared_bytes=100, scratch_bytes_per_sample=10)

    def slowdown(configuration: Configuration) -> float:
        return 1.0 + 0.3 * (len(configuration.micro_configs) == 1)

    return tune_tasks(tasks(config), config, database=database, machine=fake_machine(clock, [native, quick], slowdown))


CONFIGS = [
    Config(workspace_limit=None),
    Config(workspace_limit=150),
    Config(workspace_limit=0),
    Config(workspace_budget=1000),
    Config(workspace_budget=350),
    Config(workspace_budget=0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_replay_equals_live(config: Config) -> None:
    with Database(":memory:") as database:
        live = tuned(config, database)
        again = replay(tasks(config), config, stored(database, tasks(config)))
    assert [str(problem) for problem in again.problems] == [str(problem) for problem in live.problems]
    assert (again.division is None) == (live.division is None)
    if again.division is not None and live.division is not None:
        assert again.division.assignment == live.division.assignment


def test_another_limit_is_solved_from_the_same_measurements() -> None:
    with Database(":memory:") as database:
        tuned(Config(workspace_limit=None), database)
        tight = Config(workspace_limit=120)
        for problem in replay(tasks(tight), tight, stored(database, tasks(tight))).problems:
            assert problem.configuration.workspace_bytes <= 120
            assert problem.limit_bytes == 120
            assert "by prediction" in problem.reason


def test_a_smaller_batch_is_solved_from_the_same_measurements() -> None:
    config = Config(workspace_limit=None)
    with Database(":memory:") as database:
        tuned(config, database)
        task = Task(FORWARD, 3)
        (half,) = replay([task], config, stored(database, [task])).problems
    assert half.configuration.batch_size == 3
    assert half.baseline_s is None
    assert "was not measured at this batch size" in half.reason


def limited(limit: int) -> Config:
    return Config(workspace_limit=limit)


def budgeted(budget: int) -> Config:
    return Config(workspace_budget=budget)


@pytest.mark.parametrize(("config", "least"), [(limited, 110), (budgeted, 330)])
def test_what_does_not_fit_names_the_tasks_and_what_would(config: Callable[[int], Config], least: int) -> None:
    with Database(":memory:") as database:
        tuned(Config(workspace_limit=None), database)
        too_little, enough = config(least - 1), config(least)  # 110 bytes are the least of quick for each task
        known = stored(database, [*tasks(too_little), *tasks(enough)], {"quick": 1})
        with pytest.raises(InfeasibleError, match="n0") as caught:
            replay(tasks(too_little), too_little, known)
        assert caught.value.smallest_feasible_bytes == least
        assert len(replay(tasks(enough), enough, known).problems) == len(PROBLEMS)


# Algorithms of other packages in tuning: measured, checked at every size, stored, chosen; and none can break it.


PROBLEM = ConvProblem("forward", 8, 14, 14, 8, 1, 1)  # type: ignore[arg-type]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    mucudnn.register(Pointwise())


@pytest.mark.usefixtures("registered")
def test_it_is_measured_on_this_machine_and_stored_with_its_version(database: Path) -> None:
    tuning = mucudnn.tune(PROBLEM, 4, Config(algorithms="test/pointwise", workspace_limit=None))
    measured = {m.micro_config.algorithm: m for m in tuning.problems[0].measurements}
    assert set(measured) == {"native", "test/pointwise"}
    assert measured["test/pointwise"].relative_error < 1e-6
    with Database(database) as opened:
        assert opened.versions(tuning.environment)["test/pointwise"] == (1,)


def bench_with(quick: FakeAlgorithm) -> Bench:
    bench = Bench()
    bench.quick = quick
    quick.clock = bench.clock
    return bench


def plug_in(**changes: Any) -> FakeAlgorithm:
    return FakeAlgorithm("test/quick", Bench().clock, linear(0.01), **changes)


@dataclass(slots=True)
class Failing(FakeAlgorithm):
    """Raises what no library would, in one of its methods."""

    fails_in: str = "step"

    def supports(self, problem: ConvProblem) -> str | None:
        return self._fail("supports")

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        self._fail("internal_bytes")
        return 0

    def step(self, *operands: Any) -> None:
        self._fail("step")

    def _fail(self, method: str) -> None:
        if method == self.fails_in:
            raise KeyError("a bug")


@pytest.mark.parametrize("method", ["supports", "internal_bytes", "step"])
@pytest.mark.parametrize("limit", [None, 1000])
def test_a_bug_in_it_is_a_failure_of_that_algorithm_and_not_of_tuning(method: str, limit: int | None) -> None:
    bench = bench_with(Failing("test/quick", Bench().clock, linear(0.01), fails_in=method))
    (tuned,) = bench.tune(config=Config(workspace_limit=limit)).problems
    assert tuned.configuration.is_baseline
    if method != "internal_bytes" or limit is None:  # what cannot be counted fits no limit
        assert all("a bug" in failure.reason for failure in tuned.failures)
        assert tuned.failures


def test_solving_again_needs_no_package(database: Path) -> None:
    bench = bench_with(plug_in())
    task = Task(FORWARD, BATCH, None)
    with Database(database) as opened:
        tuning = tune([FORWARD], BATCH, NO_LIMIT, database=opened, machine=bench.machine)
        selected = select_measurements(opened, [task], BatchSizePolicy.POWER_OF_TWO)
        (solved,) = replay([task], NO_LIMIT, selected).problems
        strict = select_measurements(opened, [task], BatchSizePolicy.POWER_OF_TWO, strict=True)
    assert solved.configuration == tuning.problems[0].configuration
    assert "test/quick" not in {m.micro_config.algorithm for m in strict.measurements[task]}
