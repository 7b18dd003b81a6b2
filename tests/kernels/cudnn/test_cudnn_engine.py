"""cuDNN's engine configurations as algorithms, and as candidates of the tuner; what executes them is a fake."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.clock.machine import ENVIRONMENT, FORWARD, FakeAlgorithm, FakeClock, linear
from support.cudnn.backend import PICKY, RANDOM, STEADY, FakeBackend, in_the_place_of_cudnn

from mucudnn.core.config import Config
from mucudnn.core.errors import InvalidInputError, UnavailableError
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.core.torch_settings import TorchSettings
from mucudnn.kernels import registry
from mucudnn.kernels.algorithm import Algorithm, Workspace
from mucudnn.kernels.cudnn import backend as cudnn_backend
from mucudnn.kernels.cudnn.algorithms import CudnnEngine, CudnnEngines
from mucudnn.kernels.cudnn.backend import Engine, Plan
from mucudnn.kernels.cudnn.descriptor import NumericalNote
from mucudnn.kernels.cudnn.library import CudnnError, library
from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.operands import Operands
from mucudnn.measuring.whole_runs import Machine, whole_run
from mucudnn.testing import check_algorithm
from mucudnn.tuning.result import Tuning
from mucudnn.tuning.tuner import tune

BACKEND = FakeBackend()
ENGINE = CudnnEngine(STEADY, BACKEND)
SIZES = (1, 2, 4)


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    return in_the_place_of_cudnn(monkeypatch)


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
