"""Engine configurations: names and lists; what a step of an engine does and refuses."""

from __future__ import annotations

import ctypes
import pickle
from dataclasses import replace
from itertools import permutations

import pytest
from support.clock.machine import FORWARD
from support.configured import run
from support.cudnn.backend import PICKY, STEADY, FakeBackend, in_the_place_of_cudnn
from support.cudnn.library import FakeCudnn, FakeEngine, workspace_of

from mucudnn.core.errors import InvalidInputError, MisalignedError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.cudnn.algorithms import CudnnEngine, CudnnEngines
from mucudnn.kernels.cudnn.backend import Engine, EngineConfig, Plan, offered_engines
from mucudnn.kernels.cudnn.descriptor import HeuristicMode, NumericalNote, operation_graph
from mucudnn.kernels.cudnn.library import CudnnError, Library
from mucudnn.measuring.operands import random_operands
from mucudnn.running.executable import Executable, StepError
from mucudnn.testing.checks import Call

PROBLEM = ConvProblem(Operation.FORWARD, 4, 8, 8, 4, 3, 3)
ENGINES = (
    FakeEngine(0),
    FakeEngine(2, [NumericalNote.TENSOR_CORE]),
    FakeEngine(3, [NumericalNote.NONDETERMINISTIC], refused=((),)),
)
PROPOSED = {
    HeuristicMode.A: [(2, ((3, 1), (5, 4))), (0, ()), (2, ((3, 1), (5, 4)))],
    HeuristicMode.FALLBACK: [(0, ()), (2, ((3, 0), (5, 2)))],
}


def offered_by(cudnn: FakeCudnn) -> list[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda path: cudnn)
        library = Library("fake")
        return offered_engines(operation_graph(library, PROBLEM, 4))


@pytest.mark.parametrize("name", ["", "cudnn:", "cudnn:x", "cudnn:1 k2", "cudnn:1  k2=1", "gemm", "cudnn:1 k2=1 "])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="write for example 'cudnn:67 k2=5 k13=0'"):
        EngineConfig.named(name)


def test_offered_are_the_best_first_then_fallbacks_and_each_once() -> None:
    offered = offered_by(FakeCudnn(ENGINES, PROPOSED))
    names = ["cudnn:2 k3=1 k5=4", "cudnn:0", "cudnn:2 k3=0 k5=2"]
    assert [engine.config.name for engine in offered] == names
    first = offered[0]
    assert first.numerical_notes == {NumericalNote.TENSOR_CORE}
    assert first.workspace_bytes == workspace_of(2, ((3, 1), (5, 4)))
    assert (first.uses_tensor_cores, first.deterministic) == (True, True)


def test_one_list_that_cudnn_refuses_does_not_cost_the_other() -> None:
    cudnn = FakeCudnn(ENGINES, PROPOSED)
    every = offered_by(cudnn)
    of_mode = {}
    for refused, other in permutations((HeuristicMode.A, HeuristicMode.FALLBACK)):
        cudnn.refused_modes = {refused: 3000}
        of_mode[other] = offered_by(cudnn)
    assert of_mode[HeuristicMode.A]
    assert {*of_mode[HeuristicMode.A], *of_mode[HeuristicMode.FALLBACK]} == set(every)
    cudnn.refused_modes = {HeuristicMode.A: 3000, HeuristicMode.FALLBACK: 4000}
    with pytest.raises(CudnnError, match="no list of mode 3"):
        offered_by(cudnn)
    cudnn.refused_modes = {HeuristicMode.FALLBACK: 4004}
    with pytest.raises(CudnnError, match="no list of mode 2"):  # there may be memory later
        offered_by(cudnn)


# What a step of one of cuDNN's engines does and refuses beside computing; its failures stay its own.


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    return in_the_place_of_cudnn(monkeypatch)


def test_steps_ask_cudnn_for_nothing_but_the_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend()
    engine = CudnnEngine(STEADY, backend)
    call = Call(FORWARD.with_operation(Operation.BACKWARD_FILTER), 4)
    engine.workspace(call.problem, 1)
    monkeypatch.setattr(engine.backend, "engine", lambda plan: pytest.fail("asked again"))
    monkeypatch.setattr(backend, "_compute", lambda *_: None)
    call.run(engine, [1, 1, 1, 1])
    assert len({id(plan) for plan in backend.executed}) == 1


def test_an_engine_that_fails_says_which_step_in_cudnns_words(cudnn: FakeBackend) -> None:
    error = CudnnError("execute", 5000, "CUDNN_STATUS_EXECUTION_FAILED", "no luck")

    def fail(plan: Plan) -> None:
        raise error

    cudnn.started = cudnn.building = fail
    step, operands = MicroConfig(STEADY.name, 2), random_operands(FORWARD, 2)
    executable = Executable.of(FORWARD, Configuration((step,), 1.0, 0))
    with pytest.raises(StepError) as executing:
        executable.execute(operands.x, operands.w, operands.y)
    with pytest.raises(StepError) as building:
        executable.build()
    with pytest.raises(CudnnError, match="plan cudnn:99"):
        CudnnEngine(EngineConfig(99), cudnn).workspace(FORWARD, 2)
    for caught in (executing, building):
        copied = pickle.loads(pickle.dumps(caught.value))
        assert str(copied) == str(caught.value) == str(error)
        assert copied.problem == caught.value.problem == FORWARD
        assert copied.micro_config == caught.value.micro_config == step


TWO_SAMPLES_TOO_LARGE = replace(FORWARD, c=1, k=2**10, h=2**10, w=2**10)


def test_tensors_of_more_elements_than_an_int_counts_run_in_smaller_micro_batches() -> None:
    backend = FakeBackend()
    steady = CudnnEngine(STEADY, backend)
    assert steady.supports_micro_batch(TWO_SAMPLES_TOO_LARGE, 1) is None
    reason = "x or y of 2 sample(s) has more than 2^31 - 1 elements; smaller micro-batches fit"
    assert steady.supports_micro_batch(TWO_SAMPLES_TOO_LARGE, 2) == reason
    assert CudnnEngines(backend).offered(TWO_SAMPLES_TOO_LARGE, [2]) == []
    assert PICKY not in [engine.config for engine in CudnnEngines(backend).offered(TWO_SAMPLES_TOO_LARGE, [1, 2])]


def test_operands_off_16_bytes_are_refused(cudnn: FakeBackend) -> None:
    configuration = Configuration((MicroConfig("cudnn:7", 2),), 1.0, 0)
    whole = random_operands(FORWARD, 3)  # a sample of x or y has 72 bytes
    for x, y in ((whole.x[1:], whole.y[:2]), (whole.x[:2], whole.y[1:])):
        with pytest.raises(MisalignedError, match="multiple of 16 bytes; clone views"):
            run(FORWARD, configuration, x, whole.w, y)
    assert not cudnn.executed


@pytest.mark.parametrize("operation", Operation)
def test_plans_are_built_before_anything_is_executed(cudnn: FakeBackend, operation: Operation) -> None:
    problem = FORWARD.with_operation(operation)
    parts = (*[MicroConfig("cudnn:38 k2=5 k13=0", 4)] * 2, MicroConfig("cudnn:7", 2), MicroConfig("cudnn:7", 1))
    operands, configuration = random_operands(problem, 11), Configuration(parts, 1.0, 0)
    cudnn.started = lambda plan: cudnn.built.index(plan)
    run(problem, configuration, operands.x, operands.w, operands.y)
    assert cudnn.built == [Plan(PICKY, problem, 4), Plan(STEADY, problem, 2), Plan(STEADY, problem, 1)]
