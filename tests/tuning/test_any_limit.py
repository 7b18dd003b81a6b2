"""Any limit on workspace, from 0 on, can be kept on the processor, and what is chosen computes the convolution."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from support.clock.machine import ENVIRONMENT, TickingClock
from support.configured import run

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR, Config
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, Task
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.measuring.operands import random_operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.running.executable import Executable
from mucudnn.store.database import Database
from mucudnn.tuning.tuner import tune, tune_tasks

BATCH = 4
LAYERS = (
    {"c": 3, "h": 13, "w": 13, "k": 8, "r": 5, "s": 5, "stride": (2, 2), "padding": (2, 2)},
    {"c": 8, "h": 9, "w": 8, "k": 6, "r": 3, "s": 3, "padding": (1, 1), "memory_format": MemoryFormat.CHANNELS_LAST},
    {"c": 6, "h": 7, "w": 7, "k": 6, "r": 3, "s": 3, "padding": (1, 1), "groups": 6},
    {"c": 8, "h": 6, "w": 6, "k": 12, "r": 1, "s": 1, "dtype": "bfloat16"},
    {"c": 4, "h": 8, "w": 8, "k": 4, "r": 3, "s": 2, "dilation": (2, 1), "dtype": "float64"},
    {"c": 4, "d": 5, "h": 4, "w": 5, "k": 6, "t": 3, "r": 3, "s": 3, "stride": (2, 1, 1), "padding": (2, 1, 1)},
)
PROBLEMS = [ConvProblem(operation, **layer) for layer, operation in product(LAYERS, Operation)]  # type: ignore[arg-type]
needs_compiled = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All limits choose from the same measurements."""
    return tmp_path_factory.mktemp("any-limit") / "measurements.sqlite"


def machine() -> Machine:
    """This one's algorithms, with a clock by which every call takes as long: what fits is all that counts."""
    return Machine(ENVIRONMENT, algorithms(), clock=TickingClock())


def assert_computes(problem: ConvProblem, configuration: Configuration) -> None:
    torch.manual_seed(0)
    given = random_operands(problem, BATCH)
    expected = reference(problem, given.x, given.w, given.y)
    run(problem, configuration, given.x, given.w, given.y)
    assert relative_l2_error(given.written(problem.operation), expected) <= DEFAULT_MAX_RELATIVE_ERROR[problem.dtype], (
        configuration
    )


@needs_compiled
@pytest.mark.parametrize(
    "bound",
    [{"workspace_limit": limit} for limit in (0, 1, 1000, 2**18)] + [{"workspace_budget": n} for n in (0, 20_000)],
    ids=str,
)
def test_every_bound_is_kept_and_what_runs_is_the_convolution(bound: dict[str, int], database: Path) -> None:
    (size,) = bound.values()
    limit = bound.get("workspace_limit")
    tasks = [Task(problem, BATCH, limit) for problem in PROBLEMS]
    tuning = tune_tasks(tasks, Config(**bound, database=database), machine=machine())  # type: ignore[arg-type]
    used = [tuned.configuration.workspace_bytes for tuned in tuning.problems]
    assert len(used) == len(PROBLEMS)
    assert (sum(used) if "workspace_budget" in bound else max(used)) <= size
    for tuned in tuning.problems:
        assert Executable.of(tuned.problem, tuned.configuration).workspace_bytes <= size
        assert_computes(tuned.problem, tuned.configuration)


@needs_compiled
def test_a_call_without_headroom_has_a_configuration_without_workspace(database: Path) -> None:
    tasks = [Task(problem, BATCH, 0, in_headroom=True) for problem in PROBLEMS]
    config = Config(workspace_limit="headroom", database=database)
    for tuned in tune_tasks(tasks, config, machine=machine()).problems:
        assert tuned.configuration.is_baseline or tuned.configuration.workspace_bytes == 0
        assert_computes(tuned.problem, tuned.configuration)


@needs_compiled
@pytest.mark.parametrize("bound", ["workspace_limit", "workspace_budget"])
def test_a_time_limit_does_not_keep_a_larger_bound_from_working(bound: str) -> None:
    problems = [problem for problem in PROBLEMS if problem.dtype == "float32"]
    for size in (0, 1000, 16_000, 64_000, 200_000, 400_000):
        config = Config(**{bound: size}, time_limit=1e-6)  # type: ignore[arg-type]
        used = [
            one.configuration.workspace_bytes
            for one in tune(problems, BATCH, config, machine=machine(), database=Database(":memory:")).problems
        ]
        assert (sum(used) if bound == "workspace_budget" else max(used)) <= size


@pytest.mark.parametrize("time_limit", [None, 1e-6])
@pytest.mark.parametrize("bound", ["workspace_limit", "workspace_budget"])
def test_the_smallest_bound_that_is_named_works(bound: str, time_limit: float | None) -> None:
    config = Config(
        **{bound: 0},
        time_limit=time_limit,
        algorithms=("gemm",),  # type: ignore[arg-type]
    )
    with pytest.raises(InfeasibleError) as refused:
        tune(PROBLEMS[:6], BATCH, config, machine=machine(), database=Database(":memory:"))
    least = refused.value.smallest_feasible_bytes
    assert least
    tuning = tune(PROBLEMS[:6], BATCH, replace(config, **{bound: least}), machine=machine())
    used = [one.configuration.workspace_bytes for one in tuning.problems]
    assert (sum(used) if bound == "workspace_budget" else max(used)) <= least
    with pytest.raises(InfeasibleError):
        tune(PROBLEMS[:6], BATCH, replace(config, **{bound: least - 1}), machine=machine())


@pytest.mark.parametrize("bound", ["workspace_limit", "workspace_budget"])
def test_algorithms_that_all_need_workspace_are_infeasible_and_the_error_names_ways_out(
    bound: str, database: Path
) -> None:
    config = Config(**{bound: 0}, algorithms=("gemm",), database=database)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match=r"at least(.|\n)*Raise the workspace .*, or allow .* loop-nest"):
        tune(PROBLEMS[0], BATCH, config, machine=machine())
