"""Engine configurations: names and lists, what a step does and refuses; algorithms and candidates of the tuner."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, FakeClock, linear
from support.configured import run
from support.cudnn.backend import PICKY, RANDOM, STEADY, FakeBackend, in_the_place_of_cudnn
from support.cudnn.library import FakeCudnn, FakeEngine, workspace_of

from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, MisalignedError, UnavailableError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.kernels import registry
from mucudnn.kernels.algorithm import Algorithm, Workspace
from mucudnn.kernels.cudnn import backend as cudnn_backend
from mucudnn.kernels.cudnn.algorithms import CudnnEngine, CudnnEngines
from mucudnn.kernels.cudnn.backend import Engine, EngineConfig, Plan, offered_engines
from mucudnn.kernels.cudnn.descriptor import HeuristicMode, NumericalNote, operation_graph
from mucudnn.kernels.cudnn.library import CudnnError, Library, library
from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.whole_runs import Machine, whole_run
from mucudnn.running.executable import Executable, StepError
from mucudnn.testing import check_algorithm
from mucudnn.testing.checks import Call
from mucudnn.tuning.result import Tuning
from mucudnn.tuning.tuner import tune

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


BACKEND = FakeBackend()
ENGINE = CudnnEngine(STEADY, BACKEND)
SIZES = (1, 2, 4)


# As algorithms, and as candidates of the tuner


class EngineOnCpu(CudnnEngine):
    """An engine under a name that is not this package's, as the contract suite wants."""

    name = "tests/engine"

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        """On the CPU torch converts an operand of another dtype as a whole before it adds, on CUDA as it adds."""
        halves = problem.operation is Operation.BACKWARD_FILTER and problem.dtype in ("bfloat16", "float16")
        converted = 2 * 4 * problem.k * problem.c // problem.groups * problem.r * problem.s if halves else 0
        return super().internal_bytes(problem, micro_batch_size) + converted


@pytest.mark.usefixtures("in_one_format")
def test_engines_keep_the_contract() -> None:
    """In the declared bytes; in every split; gradients of filters are added to what is there, and in float32."""
    assert check_algorithm(EngineOnCpu(STEADY, BACKEND, adds_in_place=True), random_problems=0) > 250


def test_workspace_is_cudnns_and_a_temporary_gradient() -> None:
    of_filter = FORWARD.with_operation(Operation.BACKWARD_FILTER)
    assert ENGINE.workspace(FORWARD, 3) == Workspace(0, 99)
    assert ENGINE.workspace(of_filter, 3) == Workspace(0, 128 + 2 * 2 * 4)  # on a boundary of 64 bytes
    assert ENGINE.workspace(replace(of_filter, dtype="float16"), 3) == Workspace(2 * 2 * 4, 128 + 2 * 2 * 2)
    assert replace(ENGINE, adds_in_place=True).workspace(of_filter, 3) == Workspace(0, 100)


def test_gradients_of_filters_are_offered_in_place_too_where_the_sum_is_exact_enough(cudnn: FakeBackend) -> None:
    of_filter = FORWARD.with_operation(Operation.BACKWARD_FILTER)
    source = CudnnEngines(cudnn)
    plain = [STEADY.name, RANDOM.name]
    assert [e.name for e in source.offered(FORWARD, [1])] == plain
    volume = ConvProblem(Operation.FORWARD, FORWARD.c, FORWARD.h, FORWARD.w, FORWARD.k, 3, 3, d=4, t=3)
    assert source.offered(volume, [1]) == []
    assert [e.name for e in source.offered(replace(of_filter, dtype="float16"), [1])] == plain
    offered = source.offered(of_filter, [1])
    assert [e.name for e in offered] == [f"{name}{how}" for name in plain for how in ("", " in-place")]
    for engine in offered:
        assert algorithm(engine.name) == engine
        assert algorithm(engine.name).workspace(of_filter, 2) == engine.workspace(of_filter, 2)


def test_a_size_whose_list_fails_costs_no_other_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(FakeBackend):
        def offered(self, problem: ConvProblem, micro_batch_size: int) -> Sequence[Engine]:
            if micro_batch_size == 2:
                raise CudnnError("finalize ENGINEHEUR", 4000, "CUDNN_STATUS_INTERNAL_ERROR", "its words")
            return super().offered(problem, micro_batch_size)

    backend = Failing()
    monkeypatch.setattr(registry, "cudnn_backend", lambda: backend)
    with pytest.warns(RuntimeWarning, match=r"no engines for 2 sample\(s\) of forward .*its words"):
        tuned = Bench(backend).tune().problems[0]
    assert tuned.configuration.algorithms == (RANDOM.name,)
    reasons = {f.micro_config: f.reason for f in tuned.failures}
    assert "its words" in reasons[MicroConfig(RANDOM.name, 2)]


# What is offered


def offered(sizes: tuple[int, ...], numerics: TorchSettings, problem: ConvProblem = FORWARD) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchSettings, "current", classmethod(lambda cls: numerics))
        return [engine.name for engine in CudnnEngines(BACKEND).offered(problem, sizes)]


def test_what_any_size_has_is_offered_once_as_far_as_torchs_settings_allow() -> None:
    steady, picky, random = "cudnn:7", "cudnn:38 k2=5 k13=0", "cudnn:9 k2=-1"
    assert offered((1,), TorchSettings()) == [steady, random]
    assert offered((1, 2, 4), TorchSettings()) == [picky, steady, random]  # as the largest has them
    assert offered((2,), TorchSettings(allow_tf32=False)) == [steady, random]
    assert offered((2,), TorchSettings(allow_tf32=False), replace(FORWARD, dtype="float16")) == [picky, steady, random]
    assert offered((2,), TorchSettings(deterministic=True)) == [picky, steady]


@pytest.mark.parametrize("note", [n for n in NumericalNote if n.name.startswith(("WINOGRAD", "FFT"))])
def test_what_cudnn_says_is_a_transform_for_any_size_is_not_local(
    monkeypatch: pytest.MonkeyPatch, note: NumericalNote
) -> None:
    def offered(problem: ConvProblem, size: int) -> list[Engine]:
        notes = frozenset({note} if size == 2 else ())
        return [Engine(STEADY, notes, 0), Engine(PICKY, frozenset({NumericalNote.TENSOR_CORE}), 0)]

    backend = FakeBackend()
    monkeypatch.setattr(backend, "offered", offered)
    found = {engine.config: engine.is_local(FORWARD) for engine in CudnnEngines(backend).offered(FORWARD, SIZES)}
    assert found == {STEADY: False, PICKY: True}


def test_names_are_resolved(cudnn: FakeBackend) -> None:
    resolved = algorithm("cudnn:38 k2=5 k13=0")
    assert resolved == CudnnEngine(PICKY, cudnn)
    assert isinstance(resolved, Algorithm)
    assert (resolved.name, resolved.version) == ("cudnn:38 k2=5 k13=0", 91900)
    assert hash(resolved) == hash(algorithm("cudnn:38 k2=5 k13=0"))
    with pytest.raises(InvalidInputError, match="'cudnn:fast' is no engine configuration"):
        algorithm("cudnn:fast")


def test_names_without_cudnn_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "cudnn_backend", cudnn_backend.CudnnBackend)
    monkeypatch.setattr("mucudnn.kernels.cudnn.library._loaded_by_torch", lambda: None)  # as a CUDA build does
    monkeypatch.setenv("MUCUDNN_LIBCUDNN", str(tmp_path / "libcudnn.so.9"))
    library.cache_clear()
    with pytest.raises(UnavailableError, match=r"there is no cuDNN: .*install a CUDA build of torch"):
        algorithm("cudnn:7")


# Tuning


COSTS_S = {PICKY: 0.005, STEADY: 0.01, RANDOM: 0.001}  # of a sample


class Bench:
    """A machine on which torch's own takes 20 ms a sample, and the engines what ``COSTS_S`` says."""

    def __init__(self, backend: FakeBackend) -> None:
        self.clock, self.backend = FakeClock(), backend
        backend.started = self._start
        native = FakeAlgorithm("native", self.clock, linear(0.02), unsupported_sizes=SIZES)

        sources = [CudnnEngines(backend)]
        self.machine = Machine(
            ENVIRONMENT,
            [native],
            clock=self.clock,
            whole_run=self._whole_run,
            run_torch=self._run_torch,
            sources=sources,
        )

    def _whole_run(
        self, problem: ConvProblem, configuration: Configuration, operands: Operands, **how: bool
    ) -> Callable[[], object]:
        if configuration.is_baseline:
            return partial(self._run_torch, problem, operands)
        return whole_run(problem, configuration, operands, **how)

    def _run_torch(self, problem: ConvProblem, operands: Operands) -> None:
        self.clock.advance(0.02 * operands.batch_size)

    def _start(self, plan: Plan) -> None:
        self.clock.advance(COSTS_S[plan.config] * plan.micro_batch_size)

    def tune(self, **choices: object) -> Tuning:
        return tune([FORWARD], 4, Config(**choices), machine=self.machine)  # type: ignore[arg-type]


def chosen(tuning: Tuning) -> str:
    return str(tuning.problems[0].configuration)


def test_engines_are_tuned_stored_and_not_measured_again(cudnn: FakeBackend) -> None:
    bench = Bench(cudnn)
    first = bench.tune()
    assert first.problems[0].configuration.algorithms == ("cudnn:9 k2=-1",)
    reasons = {failure.micro_config: failure.reason for failure in first.problems[0].failures}
    assert "does not offer" in reasons[MicroConfig("cudnn:38 k2=5 k13=0", 1)]
    count = len(cudnn.executed)
    assert chosen(bench.tune()) == chosen(first)
    assert len(cudnn.executed) == count
    cudnn.version = 92000
    bench.tune()
    assert len(cudnn.executed) > count


@pytest.mark.parametrize(
    ("choices", "engine"),
    [
        ({"deterministic": True}, "cudnn:38 k2=5 k13=0"),
        ({"algorithms": ("cudnn",)}, "cudnn:9 k2=-1"),
        ({"algorithms": ("cudnn:7",)}, "cudnn:7"),
        ({"algorithms": ("native",)}, "native"),
        ({"deterministic": True, "workspace_limit": 65}, "cudnn:7"),
    ],
)
def test_the_config_chooses_among_engines(cudnn: FakeBackend, choices: dict[str, object], engine: str) -> None:
    assert Bench(cudnn).tune(**choices).problems[0].configuration.algorithms == (engine,)


def test_an_engine_whose_plan_needs_more_than_it_says_is_measured_with_what_the_plan_needs(cudnn: FakeBackend) -> None:
    cudnn.own = lambda plan: 5000 if plan.config == RANDOM else 0
    tuned = Bench(cudnn).tune().problems[0]
    assert tuned.configuration.algorithms == (CudnnEngine(RANDOM, cudnn).name,)
    needed = {m.scratch_bytes for m in tuned.measurements if m.micro_config.algorithm == "cudnn:9 k2=-1"}
    assert needed == {5000}
    assert Bench(cudnn).tune(workspace_limit=4999).problems[0].configuration.algorithms == ("cudnn:38 k2=5 k13=0",)
