"""Whole runs: what is timed is the operator that users call, and what fails in it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.torch_ops import gemm
from mucudnn.measuring.whole_runs import Machine, run_torch, training_operands, whole_run
from mucudnn.running.executable import Executable
from mucudnn.running.workspace import release_workspaces

PROBLEM = ConvProblem(Operation.FORWARD, 4, 6, 7, 6, 3, 3, padding=(1, 1))
DIVIDED = Configuration((MicroConfig("gemm", 2), MicroConfig("gemm", 1)), 1.0, 0)
BASELINE = Configuration((MicroConfig("native", 3),), 1.0, 0)
PROBLEMS = [
    replace(PROBLEM, operation=operation, memory_format=memory_format)
    for operation in Operation
    for memory_format in MemoryFormat
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_ours_is_right(problem: ConvProblem) -> None:
    operands = training_operands(problem, 3)
    result = whole_run(problem, DIVIDED, operands)()
    torch.testing.assert_close(result, run_torch(problem, operands), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("configuration", [BASELINE, DIVIDED], ids=str)
@pytest.mark.parametrize("operation", Operation)
def test_only_a_forward_pass_is_recorded_as_in_training(operation: Operation, configuration: Configuration) -> None:
    problem = PROBLEM.with_operation(operation)
    result = whole_run(problem, configuration, training_operands(problem, 3))()
    assert (result.grad_fn is not None) is (operation is Operation.FORWARD)


def test_the_executable_is_ready_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call = whole_run(PROBLEM, DIVIDED, training_operands(PROBLEM, 3))
    monkeypatch.setattr(Executable, "of", None)
    call()


@pytest.mark.parametrize("keeps_workspace", [True, False])
def test_a_workspace_is_kept_where_that_is_asked_for(keeps_workspace: bool) -> None:
    from mucudnn.running.workspace import kept_by_each_thread

    release_workspaces()
    whole_run(PROBLEM, DIVIDED, training_operands(PROBLEM, 3), keeps_workspace=keeps_workspace)()
    assert (kept_by_each_thread.workspace.buffer is not None) is keeps_workspace
    release_workspaces()


@pytest.mark.parametrize("error", [RuntimeError("it crashed"), torch.OutOfMemoryError("out of memory")])
def test_what_fails_is_an_outcome_and_nothing_stands_in(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Tensor:
        raise error

    monkeypatch.setattr(gemm.Gemm, "step", fail)
    other = Configuration((MicroConfig("direct", 3),), 1.0, 0)
    failed, compared = Machine.current().compare(PROBLEM, 3, [DIVIDED, other], keeps_workspace=True)
    assert failed is error
    assert not isinstance(compared, Exception)
