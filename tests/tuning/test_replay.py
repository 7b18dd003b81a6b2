"""Solving again from what was stored gives what tuning gave, and measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, FakeClock, fake_machine, linear

from mucudnn.database.database import Database
from mucudnn.running.environment import Environment
from mucudnn.tuning.replay import replay
from mucudnn.tuning.result import Tuning
from mucudnn.tuning.tuner import tune_tasks
from mucudnn.words.config import Config
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.results import Configuration, Measurement, WholeRun
from mucudnn.words.task import Task

BATCH = 8
VERSIONS = {"native": 1, "quick": 1}
PROBLEMS = [replace(FORWARD, k=k) for k in (2, 3, 4)]


@dataclass
class Stored:
    database: Database
    environment: Environment = ENVIRONMENT

    def measurements(self, task: Task) -> Sequence[Measurement]:
        return self.database.measurements(ENVIRONMENT, task.problem, VERSIONS)

    def whole_run(self, task: Task, configuration: Configuration) -> WholeRun | None:
        return self.database.whole_run(ENVIRONMENT, task.problem, configuration.micro_configs, VERSIONS)


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
        again = replay(tasks(config), config, Stored(database))
    assert [str(problem) for problem in again.problems] == [str(problem) for problem in live.problems]
    assert (again.divided is None) == (live.divided is None)
    if again.divided is not None and live.divided is not None:
        assert again.divided.division.assignment == live.divided.division.assignment


def test_another_limit_is_solved_from_the_same_measurements() -> None:
    with Database(":memory:") as database:
        tuned(Config(workspace_limit=None), database)
        tight = Config(workspace_limit=120)
        for problem in replay(tasks(tight), tight, Stored(database)).problems:
            assert problem.configuration.workspace_bytes <= 120
            assert problem.limit_bytes == 120
            assert "by prediction" in problem.reason


def test_a_smaller_batch_is_solved_from_the_same_measurements() -> None:
    config = Config(workspace_limit=None)
    with Database(":memory:") as database:
        tuned(config, database)
        (half,) = replay([Task(FORWARD, 3)], config, Stored(database)).problems
    assert half.configuration.batch_size == 3
    assert half.baseline_s is None
    assert "was not measured at this batch size" in half.reason


class OnlyQuick(Stored):
    """110 bytes are the least for each task."""

    def measurements(self, task: Task) -> Sequence[Measurement]:
        return [m for m in super().measurements(task) if m.micro_config.algorithm == "quick"]


def limited(limit: int) -> Config:
    return Config(workspace_limit=limit)


def budgeted(budget: int) -> Config:
    return Config(workspace_budget=budget)


@pytest.mark.parametrize(("config", "least"), [(limited, 110), (budgeted, 330)])
def test_what_does_not_fit_names_the_tasks_and_what_would(config: Callable[[int], Config], least: int) -> None:
    with Database(":memory:") as database:
        tuned(Config(workspace_limit=None), database)
        stored, too_little, enough = OnlyQuick(database), config(least - 1), config(least)
        with pytest.raises(InfeasibleError, match="n0") as caught:
            replay(tasks(too_little), too_little, stored)
        assert caught.value.smallest_feasible_bytes == least
        assert len(replay(tasks(enough), enough, stored).problems) == len(PROBLEMS)
