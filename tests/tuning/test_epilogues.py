"""Fused convolutions: whole runs have what follows them, so that what is computed inside counts."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, linear
from support.clock.shared_machine import SharedProcessors
from support.clock.two_algorithms import BATCH, NO_LIMIT, Bench

from mucudnn.database.selection import select_measurements
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.tuning.refresh import refresh
from mucudnn.tuning.replay import replay
from mucudnn.tuning.result import TunedProblem
from mucudnn.tuning.sharing import fingerprint_of
from mucudnn.tuning.tuner import tune_tasks
from mucudnn.words.config import Config
from mucudnn.words.problem import ConvProblem
from mucudnn.words.results import Configuration, WithEpilogue
from mucudnn.words.task import Task

RELU, ADDED = WithEpilogue("ReLU"), WithEpilogue("SiLU", adds=True)
VERSIONS = {"native": 1, "quick": 1}


class FusingBench(Bench):
    """Torch at 20 ms a sample, and 10 ms more for what follows; ``quick`` at 24 ms with what follows inside."""

    def __init__(self) -> None:
        super().__init__()
        self.quick.step_s = linear(0.024)

    @property
    def machine(self) -> Machine:
        made = super().machine

        def run(problem: ConvProblem, configuration: Configuration, operands: Operands, **how: bool) -> object:
            call = made.whole_run(problem, configuration, operands, **how)
            return lambda: (call(), self._follow(operands) if self._is_torchs(configuration) else None)

        def run_torch(problem: ConvProblem, operands: Operands) -> None:
            made.run_torch(problem, operands)
            self._follow(operands)

        return replace(made, whole_run=run, run_torch=run_torch, watch=SharedProcessors().watch())  # type: ignore[arg-type]

    @staticmethod
    def _is_torchs(configuration: Configuration) -> bool:
        return any(name.startswith("native") for name in configuration.algorithms)

    def _follow(self, operands: Operands) -> None:
        if operands.epilogue is not None:
            self.clock.advance(0.01 * operands.batch_size)

    def tuned(self, *epilogues: WithEpilogue | None, config: Config = NO_LIMIT) -> Sequence[TunedProblem]:
        tasks = [Task(FORWARD, BATCH, epilogue=epilogue) for epilogue in epilogues]
        return tune_tasks(tasks, config, database=self.database, machine=self.machine).problems


@pytest.fixture
def bench() -> FusingBench:
    return FusingBench()


@pytest.mark.parametrize("epilogue", [RELU, ADDED], ids=str)
def test_what_is_slower_alone_is_chosen_where_it_is_faster_with_what_follows(
    bench: FusingBench, epilogue: WithEpilogue
) -> None:
    alone, followed = bench.tuned(None, epilogue)
    assert (alone.configuration.algorithms, followed.configuration.algorithms) == (("native",), ("quick",))
    assert (alone.epilogue, followed.epilogue) == (None, epilogue)
    assert followed.speedup == pytest.approx(30 / 24)
    assert str(epilogue) in str(followed)
    assert str(epilogue) not in str(alone)


def test_what_computes_it_afterwards_as_torch_does_gains_nothing(bench: FusingBench) -> None:
    bench.quick.name = "native-other-format"  # torch's, too
    (followed,) = bench.tuned(RELU)
    assert followed.configuration.is_baseline
    assert followed.time_s == pytest.approx(0.03 * BATCH)


@pytest.mark.parametrize(("budget", "winners"), [(600, 2), (150, 1), (100, 0)])
def test_a_budget_goes_to_those_that_gain_with_what_follows(bench: FusingBench, budget: int, winners: int) -> None:
    """``quick`` needs 110 bytes at least; alone it is slower than torch's own, and would get nothing."""
    alone, *followed = bench.tuned(None, RELU, ADDED, config=Config(workspace_budget=budget))
    assert (alone.configuration.algorithms, alone.time_s) == (("native",), pytest.approx(0.02 * BATCH))
    assert sum(one.configuration.algorithms == ("quick",) for one in followed) == winners
    for one in followed:
        step_s = 0.024 if one.configuration.algorithms == ("quick",) else 0.03
        assert (one.baseline_s, one.time_s) == (pytest.approx(0.03 * BATCH), pytest.approx(step_s * BATCH))


@pytest.mark.parametrize("budget", [None, 150], ids=str)
def test_a_replay_of_fused_convolutions_answers_as_the_tuning(bench: FusingBench, budget: int | None) -> None:
    config = NO_LIMIT if budget is None else Config(workspace_budget=budget)
    tasks = [Task(FORWARD, BATCH, epilogue=epilogue) for epilogue in (None, RELU, ADDED)]
    tuned = tune_tasks(tasks, config, database=bench.database, machine=bench.machine)
    again = replay(tasks, config, select_measurements(bench.database, tasks, config.policy))
    assert [(one.configuration, one.time_s, one.reason) for one in again.problems] == [
        (one.configuration, one.time_s, one.reason) for one in tuned.problems
    ]


def test_micro_batches_are_measured_once_for_all_that_may_follow(bench: FusingBench) -> None:
    other = FusingBench()
    other.tuned(None)
    bench.tuned(None, RELU, ADDED)
    assert bench.steps == other.steps


def test_what_was_run_whole_is_found_again(bench: FusingBench) -> None:
    first = bench.tuned(None, RELU, ADDED)
    seconds = bench.clock.seconds
    assert bench.tuned(None, RELU, ADDED) == first
    assert bench.clock.seconds == seconds


def test_a_whole_run_counts_for_its_own_epilogue_alone(bench: FusingBench) -> None:
    (tuned,) = bench.tuned(RELU)
    key = (ENVIRONMENT, FORWARD, tuned.configuration.micro_configs, VERSIONS)
    assert bench.database.whole_run(*key, RELU) is not None
    assert bench.database.whole_run(*key, ADDED) is None
    assert bench.database.whole_run(*key) is None


def test_what_follows_is_there_when_it_is_measured_again(bench: FusingBench) -> None:
    bench.tuned(None, RELU)
    before = {how: bench.database.whole_runs(ENVIRONMENT, FORWARD, VERSIONS, how) for how in (None, RELU)}
    found = refresh(bench.database, bench.machine, everything=True)
    assert sorted(run.now.baseline_s / BATCH for run in found.whole_runs) == pytest.approx(
        [0.02] * len(before[None]) + [0.03] * len(before[RELU])
    )
    for how, runs in before.items():
        now = bench.database.whole_runs(ENVIRONMENT, FORWARD, VERSIONS, how)
        assert {parts: run.speedup for parts, run in now.items()} == pytest.approx(
            {parts: run.speedup for parts, run in runs.items()}
        )


def test_ranks_tell_tasks_apart_and_send_them(bench: FusingBench) -> None:
    tasks = [Task(FORWARD, BATCH, epilogue=epilogue) for epilogue in (None, RELU, ADDED)]
    told = fingerprint_of(tasks, NO_LIMIT, bench.machine, bench.database)
    assert pickle.loads(pickle.dumps(tasks)) == tasks
    assert len({*told.convolutions}) == len(tasks)
