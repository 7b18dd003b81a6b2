"""A budget divided over tasks, with whole runs that correct what was predicted. Whole runs are told, not made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD
from support.clock.two_algorithms import NO_LIMIT, Bench
from support.problems.measurements import measured
from support.told_jobs import told_job

from mucudnn.core.answers import TunedProblem
from mucudnn.core.records import Comparison, Configuration, Measurement, MicroConfig, Task
from mucudnn.measuring.quiet import Quiet
from mucudnn.solver.division import Division
from mucudnn.store.tuning_store import EnvironmentStore
from mucudnn.tuning.choose import choose, run_whole
from mucudnn.tuning.divide import divide
from mucudnn.tuning.job import Context, Job, Outcome

BATCH = 4


# Torch in 100 ms without workspace; the more workspace, the faster.
TORCH = measured("native", BATCH, 0.1, 0)
SMALL = measured("small", BATCH, 0.08, 10)
LARGE = measured("large", BATCH, 0.05, 100)
FIRST, SECOND = Task(FORWARD, BATCH, name="first"), Task(replace(FORWARD, k=3), BATCH, name="second")


@dataclass
class WholeRuns:
    """Every whole run takes what was predicted, times ``slowdown``; ``asked`` are the configurations that were run."""

    slowdown: Callable[[Task, str], float] = lambda task, algorithm: 1.0
    outcome: Callable[[Task, str], Outcome] | None = None
    asked: list[tuple[str, str]] = field(default_factory=list)

    def job(self, task: Task, measurements: Sequence[Measurement]) -> Job:
        return told_job(task, measurements, partial(self._run, task))

    def divide(
        self, measurements: Mapping[Task, Sequence[Measurement]], budget: int | None
    ) -> tuple[dict[Task, TunedProblem], Division[Task]]:
        return divide([self.job(task, known) for task, known in measurements.items()], budget)

    def _run(self, task: Task, configuration: Configuration) -> Outcome:
        algorithm = configuration.micro_configs[0].algorithm
        self.asked.append((task.name, algorithm))
        if self.outcome is not None:
            return self.outcome(task, algorithm)
        return Comparison(TORCH.step_s, configuration.time_s * self.slowdown(task, algorithm), 0.0)


def chosen(measurements: Mapping[Task, Sequence[Measurement]], budget: int | None, runs: WholeRuns) -> dict[str, str]:
    choices, division = runs.divide(measurements, budget)
    assert budget is None or division.workspace_bytes <= budget
    assert division.workspace_bytes == sum(c.configuration.workspace_bytes for c in choices.values())
    return {task.name: choice.configuration.micro_configs[0].algorithm for task, choice in choices.items()}


BOTH = {FIRST: [TORCH, SMALL, LARGE], SECOND: [TORCH, SMALL, LARGE]}


@pytest.mark.parametrize(
    ("budget", "algorithms"),
    [
        (None, {"first": "large", "second": "large"}),
        (200, {"first": "large", "second": "large"}),
        (199, {"first": "large", "second": "small"}),
        (110, {"first": "large", "second": "small"}),
        (109, {"first": "large", "second": "native"}),
        (99, {"first": "small", "second": "small"}),
        (10, {"first": "small", "second": "native"}),
        (0, {"first": "native", "second": "native"}),
    ],
)
def test_the_budget_goes_where_it_saves_most(budget: int | None, algorithms: dict[str, str]) -> None:
    found = chosen(BOTH, budget, WholeRuns())
    assert sorted(found.values()) == sorted(algorithms.values())


def test_only_what_is_chosen_is_run_and_each_once() -> None:
    runs = WholeRuns()
    runs.divide(BOTH, 110)
    assert len(runs.asked) == len(set(runs.asked)) == 2


def test_what_whole_runs_tell_changes_the_division() -> None:
    """Predicted to be best, but slower than torch in one of the two tasks: its segment goes to the other."""
    was_predicted = []
    for slow, other in (("first", "second"), ("second", "first")):
        runs = WholeRuns(lambda task, name, slow=slow: 3.0 if (task.name, name) == (slow, "large") else 1.0)
        assert chosen(BOTH, 110, runs) == {slow: "small", other: "large"}
        was_predicted.append((slow, "large") in runs.asked)
    assert sorted(was_predicted) == [False, True], "the prediction is right in one case, and corrected in the other"


def test_where_nothing_is_faster_in_whole_runs_torch_stays() -> None:
    runs = WholeRuns(slowdown=lambda task, algorithm: 4.0)
    assert chosen(BOTH, None, runs) == {"first": "native", "second": "native"}


def test_a_slower_one_is_taken_where_torch_needs_too_much() -> None:
    needy = {task: [replace(TORCH, scratch_bytes=1000), SMALL] for task in BOTH}
    choices, _ = WholeRuns(slowdown=lambda task, algorithm: 4.0).divide(needy, 1010)
    assert sorted(c.configuration.algorithms for c in choices.values()) == [("native",), ("small",)]
    slower = next(c for c in choices.values() if c.configuration.algorithms == ("small",))
    assert slower.baseline_s is not None
    assert slower.time_s > slower.baseline_s
    assert "PyTorch's own needs 1000 B" in slower.reason


def test_what_cannot_run_whole_is_left_out() -> None:
    def outcome(task: Task, algorithm: str) -> Outcome:
        return RuntimeError("it crashed") if algorithm == "large" else Comparison(0.1, 0.08, 0.0)

    assert chosen(BOTH, None, WholeRuns(outcome=outcome)) == {"first": "small", "second": "small"}


def test_without_whole_runs_predictions_count() -> None:
    choices, _ = WholeRuns(outcome=lambda task, algorithm: None).divide(BOTH, 110)
    assert {c.reason for c in choices.values()} == {"best use of the budget by prediction, not run"}
    assert {c.baseline_s for c in choices.values()} == {0.1}


def test_alone_without_whole_runs_the_prediction_is_taken_and_said() -> None:
    unknown = WholeRuns(outcome=lambda task, algorithm: None)
    choice = choose(unknown.job(replace(FIRST, limit_bytes=99), BOTH[FIRST]))
    assert (choice.configuration.algorithms, choice.baseline_s, choice.time_s) == (("small",), 0.1, 0.08)
    assert choice.reason == "fastest by prediction, not run"
    lead = measured("small", BATCH, 0.0975, 10)  # below the least gain
    assert choose(unknown.job(FIRST, [TORCH, lead])).configuration.is_baseline
    alone = choose(unknown.job(FIRST, [LARGE]))
    assert alone.baseline_s is None
    assert "PyTorch's own was not measured" in alone.reason


@pytest.mark.parametrize(
    ("slowdown", "limit", "asked", "algorithm"),
    [
        (1.0, None, ["large"], "large"),
        (1.2, None, ["large"], "large"),  # all may be off by as much
        (1.7, None, ["large", "small"], "small"),
        (1.5, None, ["large"], "large"),  # small is predicted to be slower still
        (2.5, None, ["large", "small"], "small"),
        (2.5, 99, ["small"], "small"),
    ],
)
def test_a_whole_run_that_is_slower_than_predicted_lets_others_try(
    slowdown: float, limit: int | None, asked: list[str], algorithm: str
) -> None:
    runs = WholeRuns(lambda task, name: slowdown if name == "large" else 1.0)
    choice = choose(runs.job(replace(FIRST, limit_bytes=limit), BOTH[FIRST]))
    assert [name for _, name in runs.asked] == asked
    assert choice.configuration.algorithms == (algorithm,)


@pytest.mark.parametrize(
    ("torchs_s", "large_s"),
    [
        (0.2, 0.1),  # the machine is half as fast as it was
        (0.05, 0.05),  # only torch's own is faster than it was
    ],
)
def test_a_whole_run_as_slow_as_torchs_own_or_as_fast_as_predicted_is_no_surprise(
    torchs_s: float, large_s: float
) -> None:
    runs = WholeRuns(outcome=lambda task, algorithm: Comparison(torchs_s, large_s, 0.0))
    choose(runs.job(FIRST, BOTH[FIRST]))
    assert [name for _, name in runs.asked] == ["large"]


def test_where_torchs_own_does_not_fit_the_slowest_of_whole_runs_is_not_kept() -> None:
    """Single samples of torch's own were measured in a quiet moment, the others under load."""
    single = measured("native", 1, 0.001, 0)
    needy = measured("native", BATCH, 0.01, 100)
    slow_looking = measured("small", BATCH, 0.05, 10)
    runs = WholeRuns(outcome=lambda task, algorithm: Comparison(0.01, 0.06 if algorithm == "native" else 0.005, 0.0))
    choice = choose(runs.job(replace(FIRST, limit_bytes=10), [single, needy, slow_looking]))
    assert choice.configuration.algorithms == ("small",)


@pytest.mark.parametrize(
    ("divided_s", "undivided_s", "parts"),
    [
        (0.1, 0.08, 1),  # it is run beside the divided one, which is predicted to be faster
        (0.0785, 0.08, 1),  # as fast
        (0.095, 0.0972, 2),  # the undivided one is no gain
    ],
)
def test_an_undivided_one_that_is_as_fast_is_preferred(divided_s: float, undivided_s: float, parts: int) -> None:
    half = measured("small", BATCH // 2, 0.039, 10)

    def run(configuration: Configuration) -> Outcome:
        return Comparison(0.1, divided_s if len(configuration.micro_configs) > 1 else undivided_s, 0.0)

    choice = choose(told_job(FIRST, [TORCH, SMALL, half], run))
    assert choice.configuration.algorithms == ("small",)
    assert len(choice.configuration.micro_configs) == parts


@pytest.mark.parametrize(
    ("error", "fine_s", "algorithm"),
    [
        (5e-7, 0.052, "fine"),
        (5e-7, 0.054, "coarse"),
        (4e-7, 0.051, "fine"),
        (4e-7, 0.052, "coarse"),
        (3.9e-7, 0.051, "coarse"),
    ],
)
def test_half_the_error_is_preferred_at_equal_speed_which_includes_more_where_torchs_is_far_below(
    error: float, fine_s: float, algorithm: str
) -> None:
    coarse = measured("coarse", BATCH, 0.050, 10, relative_error=error)
    fine = measured("fine", BATCH, 0.051, 10, relative_error=2e-7)
    runs = WholeRuns(outcome=lambda task, name: Comparison(0.1, 0.05 if name == "coarse" else fine_s, 0.0))
    assert choose(runs.job(FIRST, [TORCH, coarse, fine])).configuration.algorithms == (algorithm,)


@pytest.mark.parametrize(("left_s", "runs"), [(-1.0, 1), (0.0, 1), (1e4, 3)])
def test_whole_runs_begin_only_if_they_end_in_time_but_for_the_first(left_s: float, runs: int) -> None:
    bench = Bench()
    bench.clock.advance(1000.0)
    store, quiet = EnvironmentStore(bench.database, ENVIRONMENT), Quiet(bench.machine.watch, bench.progress)
    context = Context(NO_LIMIT, bench.machine, store, quiet, bench.progress, {}, versions={"quick": 1})
    context.due_s = bench.clock.now() + left_s
    configurations = [Configuration((MicroConfig("quick", size),) * (8 // size), 0.1, 0) for size in (8, 4, 2)]
    outcomes = run_whole(Job(Task(FORWARD, 8), 0.0, (), (), {}), configurations, context)
    assert [isinstance(outcomes[one], Comparison) for one in configurations] == [True] * runs + [False] * (3 - runs)
