"""The rivals of micro-batches: cuDNN's engines as torch would run them; what executes them is a fake."""

from __future__ import annotations

import pytest
import torch
from support.clock.machine import ENVIRONMENT, FakeAlgorithm, FakeClock, linear
from support.cudnn.backend import PICKY, STEADY, FakeBackend
from support.problems.measurements import measured

from mucudnn.bench.suites.limits.undivided import Undivided, run_alone
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.cudnn.algorithms import CudnnEngines
from mucudnn.measuring.operands import random_operands
from mucudnn.measuring.whole_runs import Machine
from mucudnn.testing.geometries import geometry
from mucudnn.words.problem import MemoryFormat, Operation
from mucudnn.words.task import Task


@pytest.mark.parametrize("memory_format", MemoryFormat)
@pytest.mark.parametrize("operation", Operation)
def test_an_engine_writes_the_result_alone(operation: Operation, memory_format: MemoryFormat) -> None:
    problem, batch_size, _ = geometry("same-3x3", operation, memory_format=memory_format)
    backend = FakeBackend()
    operands = random_operands(problem, batch_size)
    before = [tensor.clone() for tensor in (operands.x, operands.w, operands.y)]
    result = run_alone(CudnnEngines(backend).undivided(problem, batch_size)[STEADY.name], problem, operands)
    assert relative_l2_error(result, reference(problem, operands.x, operands.w, operands.y)) <= 1e-5
    assert [plan.beta for plan in backend.executed] == [0.0]
    for tensor, original in zip((operands.x, operands.w, operands.y), before, strict=True):
        assert torch.equal(tensor, original)


@pytest.mark.parametrize("operation", Operation)
def test_rivals_are_engines_with_their_own_workspace(operation: Operation) -> None:
    """Without the temporary for dw that mucudnn's own call of an engine takes."""
    problem, batch_size, _ = geometry("same-3x3", operation)
    sources = CudnnEngines(FakeBackend())
    machine = Machine(ENVIRONMENT, [], clock=FakeClock(), sources=[sources])
    measurements = [measured("native", batch_size, 0.1, 10**9), measured("cudnn:7", 1, 0.1, 10**9)]
    for engine in sources.offered(problem, [batch_size]):
        workspace = engine.workspace(problem, batch_size)
        step_s = 0.1 if engine.config == PICKY else 0.2
        measurements.append(measured(engine.name, batch_size, step_s, workspace.scratch_bytes))
    undivided = Undivided.of(Task(problem, batch_size), machine, measurements)
    needed = 33 * batch_size
    assert [str(c) for c in undivided.within(2 * needed, 1)] == [f"{PICKY.name} {batch_size}"]
    assert undivided.within(2 * needed, 1)[0].workspace_bytes == 2 * needed
    names = {c.algorithms[0] for c in undivided.within(2 * needed - 1, 5)}
    assert STEADY.name in names
    assert PICKY.name not in names


def test_without_engines_all_algorithms_are_rivals_and_only_whole_mini_batches() -> None:
    clock = FakeClock()
    machine = Machine(ENVIRONMENT, [FakeAlgorithm("native", clock, linear(1.0))], clock=clock)
    problem, n, _ = geometry("pointwise", Operation.FORWARD)
    measurements = [measured("native", n, 0.3, 10), measured("fast", n, 0.1, 50), measured("fast", 1, 0.01, 5)]
    undivided = Undivided.of(Task(problem, n), machine, measurements)
    assert [str(c) for c in undivided.within(None, 5)] == [f"fast {n}", f"native {n}"]
    assert [str(c) for c in undivided.within(50, 1)] == [f"fast {n}"]
    assert [str(c) for c in undivided.within(49, 5)] == [f"native {n}"]
    assert undivided.within(9, 5) == []
    assert undivided.of_library(undivided.within(None, 1)[0]) is None
