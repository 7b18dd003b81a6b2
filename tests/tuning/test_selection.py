"""Stored measurements: complete and sound for solving, of one environment and version, or refused with what to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.database_rows import HERE
from support.problems.measurements import measured as made_up

from mucudnn.core.config import BatchSizePolicy
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import (
    Comparison,
    Configuration,
    Environment,
    Failure,
    MicroConfig,
    Task,
)
from mucudnn.solver.reuse import micro_batch_sizes
from mucudnn.store.database import Database
from mucudnn.tuning.replay import select_measurements

POWERS, ALL, UNDIVIDED = BatchSizePolicy.POWER_OF_TWO, BatchSizePolicy.ALL, BatchSizePolicy.UNDIVIDED
FORWARD = ConvProblem(Operation.FORWARD, 4, 8, 8, 4, 3, 3, padding=(1, 1))
DATA = FORWARD.with_operation(Operation.BACKWARD_DATA)
FILTER = FORWARD.with_operation(Operation.BACKWARD_FILTER)
ELSEWHERE = replace(HERE, device="Xeon", threads=1)


measured = partial(made_up, step_s=1.0, scratch_bytes=16, setup_s=0.5, prepared_bytes=8, noise=0.1, samples=3)


@pytest.fixture
def opened() -> Iterator[Database]:
    with Database(":memory:") as database:
        yield database


def fill(
    database: Database,
    problems: Sequence[ConvProblem] = (FORWARD,),
    sizes: Sequence[int] = (1, 2, 4),
    algorithms: Sequence[str] = ("native", "gemm"),
    environment: Environment = HERE,
    version: int = 1,
) -> None:
    for problem, algorithm, size in product(problems, algorithms, sizes):
        database.add(environment, problem, version, measured(algorithm, size))


def refusal(database: Database, *tasks: Task, policy: BatchSizePolicy = POWERS, **choice: object) -> str:
    with pytest.raises(InvalidInputError) as caught:
        select_measurements(database, tasks, policy, **choice)  # type: ignore[arg-type]
    return str(caught.value)


def test_every_task_has_what_was_measured_for_its_problem(opened: Database) -> None:
    fill(opened, [FORWARD], sizes=[1, 2])
    fill(opened, [DATA, replace(DATA, k=8)], algorithms=["native"])
    opened.add_failure(HERE, FORWARD, 1, Failure(MicroConfig("gemm", 2), "out of memory"))
    tasks = [Task(FORWARD, 2, name="one"), Task(FORWARD, 2, name="two"), Task(DATA, 4)]
    stored = select_measurements(opened, tasks, POWERS)
    assert stored.environment == HERE
    for task in tasks:
        assert tuple(stored.measurements[task]) == opened.measurements(HERE, task.problem, {"native": 1, "gemm": 1})


@pytest.mark.parametrize("policy", BatchSizePolicy)
@settings(max_examples=15)
@given(st.sets(st.integers(1, 12)), st.integers(1, 12))
def test_sizes_are_those_of_the_policy_and_cover_the_batch(
    policy: BatchSizePolicy, sizes: set[int], batch_size: int
) -> None:
    usable = sizes & {*micro_batch_sizes(policy, batch_size)}
    covered = {0}
    for _ in range(batch_size):
        covered |= {n + size for n in covered for size in usable if n + size <= batch_size}
    task = Task(FORWARD, batch_size)
    with Database(":memory:") as database:
        fill(database, [DATA])  # so that there is an environment
        fill(database, sizes=sorted(sizes), algorithms=["gemm"])
        try:
            stored = select_measurements(database, [task], policy)
        except InvalidInputError:
            assert batch_size not in covered
        else:
            assert batch_size in covered
            assert [m.micro_config.micro_batch_size for m in stored.measurements[task]] == sorted(usable)


# One environment


def test_several_environments_are_refused_with_what_each_has(opened: Database) -> None:
    assert "there are no measurements to choose from; make some with mucudnn tune" in refusal(opened, Task(FORWARD, 4))
    fill(opened, [FORWARD, DATA])
    fill(opened, [DATA], environment=ELSEWHERE)
    fill(opened, [replace(FORWARD, k=8)], environment=replace(HERE, device="ARM"))
    message = refusal(opened, Task(FORWARD, 4), Task(DATA, 4))
    assert "several environments; pick one with --environment, by its number or part" in message
    assert f"1: {HERE}; has 2 of the 2 problems asked for" in message
    assert f"2: {replace(HERE, device='ARM')}; has 0 of the 2 problems asked for" in message
    assert f"3: {ELSEWHERE}; has 1 of the 2 problems asked for" in message


def test_an_environment_is_picked_by_number_or_text(opened: Database) -> None:
    fill(opened, environment=replace(HERE, device="ARM"))
    fill(opened)
    fill(opened, environment=ELSEWHERE, version=2)
    for text in ("3", "Xeon", "xeon (avx512), 1 thread", str(ELSEWHERE)):
        stored = select_measurements(opened, [Task(FORWARD, 4)], POWERS, environment=text)
        assert (stored.environment, stored.versions) == (ELSEWHERE, {"gemm": 2, "native": 2})
    for text in ("9", "0", "Cray", "torch"):
        message = refusal(opened, Task(FORWARD, 4), environment=text)
        assert f"environment is {text!r}, which picks none or several; pick one" in message
        assert f"\n  1: {HERE}; has 1 of the 1 problems asked for\n  2: " in message
    longer = replace(HERE, compiled=HERE.compiled + "-vnni")
    fill(opened, environment=longer)
    for environment in (HERE, longer):  # a whole description is not part of another
        stored = select_measurements(opened, [Task(FORWARD, 4)], POWERS, environment=str(environment))
        assert stored.environment == environment


# One version


def test_older_versions_are_set_aside(opened: Database) -> None:
    fill(opened, version=9)
    fill(opened, algorithms=["gemm"], version=10)
    fill(opened, algorithms=["gemm"], version=11, environment=ELSEWHERE)
    stored = select_measurements(opened, [Task(FORWARD, 4)], UNDIVIDED, environment="EPYC")
    assert stored.versions == {"gemm": 10, "native": 9}
    assert len(stored.measurements[Task(FORWARD, 4)]) == 2


def test_algorithms_are_those_named_and_torchs_own(opened: Database) -> None:
    fill(opened, algorithms=["direct", "gemm", "native"])
    stored = select_measurements(opened, [Task(FORWARD, 4)], UNDIVIDED, algorithms=("gemm",))
    assert [m.micro_config.algorithm for m in stored.measurements[Task(FORWARD, 4)]] == ["gemm", "native"]
    expected = "algorithms has gem, x; measured are direct, gemm, native"
    assert expected in refusal(opened, Task(FORWARD, 4), algorithms=("gem", "direct", "x"))


def test_strict_leaves_what_is_known_to_be_local_for_the_problem(opened: Database) -> None:
    names = ("native", "native-other-format", "gemm", "direct", "winograd-4x4", "cudnn:6 k2=5", "cudnn:7", "magic")
    for problem, used in (
        (FORWARD, {"direct", "gemm", "native", "native-other-format"}),
        (FILTER, {"gemm", "native", "native-other-format"}),
    ):
        fill(opened, [problem], algorithms=names)
        stored = select_measurements(opened, [Task(problem, 4)], UNDIVIDED, strict=True)
        assert {m.micro_config.algorithm for m in stored.measurements[Task(problem, 4)]} == used


def test_everything_that_is_missing_is_named(opened: Database) -> None:
    fill(opened, [FORWARD, DATA], sizes=[4, 8])
    message = refusal(opened, Task(DATA, 8), Task(FILTER, 4, name="other"), Task(FORWARD, 6, name="uncovered"))
    assert "lack 2 of the 3 convolutions asked for; measure them by mucudnn tune" in message
    assert message.endswith("\n  other, batch 4\n  uncovered, batch 6")


# Whole runs


HALVES = Configuration((MicroConfig("gemm", 2),) * 2, 1.0, 0)


def test_verifications_are_of_the_same_environment_and_version(opened: Database) -> None:
    fill(opened, [FORWARD, DATA], version=2)
    fill(opened, environment=ELSEWHERE, version=2)
    newest = Comparison(2.0, 1.0, 0.1)
    for environment, version, verification in (
        (HERE, 2, Comparison(4.0, 1.0, 0.1)),
        (HERE, 2, newest),
        (HERE, 1, Comparison(5.0, 1.0, 0.1)),
        (ELSEWHERE, 2, Comparison(6.0, 1.0, 0.1)),
    ):
        opened.add_whole_run(environment, FORWARD, HALVES.micro_configs, {"gemm": version}, verification)
    forward, data = Task(FORWARD, 4), Task(DATA, 4)
    stored = select_measurements(opened, [forward, data], POWERS, environment="EPYC")
    assert stored.whole_runs == {forward: {HALVES.micro_configs: newest}, data: {}}


def test_whole_runs_with_a_fresh_workspace_are_apart(opened: Database) -> None:
    fill(opened)
    kept, fresh = (Comparison(4.0, time_s, 0.1) for time_s in (1.0, 2.0))
    for run, is_fresh in ((fresh, True), (kept, False)):
        opened.add_whole_run(HERE, FORWARD, HALVES.micro_configs, {"gemm": 1}, run, fresh=is_fresh)
    tasks = [Task(FORWARD, 4), Task(FORWARD, 4, in_headroom=True)]
    stored = select_measurements(opened, tasks, POWERS)
    assert [stored.whole_runs[task][HALVES.micro_configs] for task in tasks] == [kept, fresh]
