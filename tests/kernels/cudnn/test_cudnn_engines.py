"""Engine configurations: names, lists and devices; what a step of an engine does and refuses."""

from __future__ import annotations

import ctypes
import gc
import json
import pickle
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.clock.machine import FORWARD
from support.configured import run
from support.cudnn.backend import PICKY, STEADY, FakeBackend, in_the_place_of_cudnn
from support.cudnn.library import BAD_PARAM, NOT_INITIALIZED, FakeCudnn, FakeEngine, workspace_of

from mucudnn.kernels.cudnn import device as module
from mucudnn.kernels.cudnn.algorithms import CudnnEngine, CudnnEngines, Plan, Pointers
from mucudnn.kernels.cudnn.constants import Attribute, BehaviorNote, DescriptorKind, HeuristicMode, NumericalNote
from mucudnn.kernels.cudnn.device import Device, current_device, described_device
from mucudnn.kernels.cudnn.engines import EngineConfig
from mucudnn.kernels.cudnn.library import CudnnError, Library
from mucudnn.measuring.operands import random_operands
from mucudnn.running.executable import Executable, StepError
from mucudnn.testing.guarded_call import Call
from mucudnn.words.errors import InvalidInputError, MisalignedError, UnavailableError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.results import Configuration, MicroConfig

PROBLEM = ConvProblem(Operation.FORWARD, 4, 8, 8, 4, 3, 3)
ENGINES = (
    FakeEngine(0),
    FakeEngine(2, [NumericalNote.TENSOR_CORE], [BehaviorNote.RUNTIME_COMPILATION], {5: (2, 6, 2), 3: (0, 1, 0)}),
    FakeEngine(3, [NumericalNote.NONDETERMINISTIC], refused=((),)),
)
PROPOSED = {
    HeuristicMode.A: [(2, ((3, 1), (5, 4))), (0, ()), (2, ((3, 1), (5, 4)))],
    HeuristicMode.FALLBACK: [(0, ()), (2, ((3, 0), (5, 2)))],
}


def fake_device(cudnn: FakeCudnn) -> Device:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda path: cudnn)
        patch.setattr(module, "library", lambda: Library("fake"))
        return described_device("h200")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    """A cuDNN that makes no handle."""
    cudnn = FakeCudnn(ENGINES, PROPOSED)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: cudnn)
    monkeypatch.setattr(module, "library", lambda: Library("fake"))
    cudnn.refused["cudnnCreate"] = (NOT_INITIALIZED, b"cudaGetDeviceCount(&count) != cudaSuccess")
    return cudnn


knobs = st.dictionaries(st.integers(0, 60), st.integers(-5, 3000)).map(lambda chosen: tuple(sorted(chosen.items())))


@given(st.integers(0, 99), knobs)
def test_names_round_trip(engine: int, chosen: tuple[tuple[int, int], ...]) -> None:
    config = EngineConfig(engine, chosen)
    assert EngineConfig.named(config.name) == config


def test_names_are_as_databases_have_them() -> None:
    assert EngineConfig(41, ((2, 0), (12, -1))).name == "cudnn:41 k2=0 k12=-1"
    assert EngineConfig(0).name == "cudnn:0"


@pytest.mark.parametrize("name", ["", "cudnn:", "cudnn:x", "cudnn:1 k2", "cudnn:1  k2=1", "gemm", "cudnn:1 k2=1 "])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match="write for example 'cudnn:67 k2=5 k13=0'"):
        EngineConfig.named(name)


def test_offered_are_the_best_first_then_fallbacks_and_each_once() -> None:
    offered = fake_device(FakeCudnn(ENGINES, PROPOSED)).engines(PROBLEM, 4)
    names = ["cudnn:2 k3=1 k5=4", "cudnn:0", "cudnn:2 k3=0 k5=2"]
    assert [engine.config.name for engine in offered] == names
    first = offered[0]
    assert first.numerical_notes == {NumericalNote.TENSOR_CORE}
    assert first.behavior_notes == {BehaviorNote.RUNTIME_COMPILATION}
    assert first.workspace_bytes == workspace_of(2, ((3, 1), (5, 4)))
    assert (first.uses_tensor_cores, first.deterministic) == (True, True)


def test_every_engine_are_the_offered_then_all_settings_that_cudnn_takes() -> None:
    """Engine 1 is none, 3 is refused as it is; a stride of 0 counts by one; settings sort by knob."""
    everything = fake_device(FakeCudnn(ENGINES, PROPOSED)).engines(PROBLEM, 4, every=True)
    names = [engine.config.name for engine in everything]
    assert names[:3] == ["cudnn:2 k3=1 k5=4", "cudnn:0", "cudnn:2 k3=0 k5=2"]
    settings = {f"cudnn:2 k3={a} k5={b}" for a in (0, 1) for b in (2, 4, 6)}
    assert set(names) == settings | {"cudnn:0", "cudnn:2"}
    assert len(names) == len(set(names))


def test_a_note_of_a_newer_cudnn_goes_by_its_number() -> None:
    cudnn = FakeCudnn((FakeEngine(0, [NumericalNote.FFT, 17]),), {HeuristicMode.A: [(0, ())]})
    (engine,) = fake_device(cudnn).engines(PROBLEM, 4)
    assert sorted(note.name for note in engine.numerical_notes) == ["FFT", "NOTE_17"]


def test_one_list_that_cudnn_refuses_does_not_cost_the_other() -> None:
    cudnn = FakeCudnn(ENGINES, PROPOSED)
    every = fake_device(cudnn).engines(PROBLEM, 4)
    of_mode = {}
    for refused, other in permutations((HeuristicMode.A, HeuristicMode.FALLBACK)):
        cudnn.refused_modes = {refused: 3000}
        of_mode[other] = fake_device(cudnn).engines(PROBLEM, 4)
    assert of_mode[HeuristicMode.A]
    assert {*of_mode[HeuristicMode.A], *of_mode[HeuristicMode.FALLBACK]} == set(every)
    cudnn.refused_modes = {HeuristicMode.A: 3000, HeuristicMode.FALLBACK: 4000}
    with pytest.raises(CudnnError, match="no list of mode 3"):
        fake_device(cudnn).engines(PROBLEM, 4)
    cudnn.refused_modes = {HeuristicMode.FALLBACK: 4004}
    with pytest.raises(CudnnError, match="no list of mode 2"):  # there may be memory later
        fake_device(cudnn).engines(PROBLEM, 4)


def test_a_described_device_is_asked_of_without_a_handle(no_gpu: FakeCudnn, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"deviceName": "Mine"}')
    device = described_device(str(path))
    assert device.name == "Mine"
    device.engines(PROBLEM, 1)
    assert "cudnnCreate" not in no_gpu.calls
    heuristics = [made.content for made in no_gpu.made if made.kind == DescriptorKind.ENGINEHEUR]
    assert all(Attribute.ENGINEHEUR_DEVICEPROP in content for content in heuristics)


def test_the_current_device_is_asked_of_through_its_handle(no_gpu: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Mine")
    del no_gpu.refused["cudnnCreate"]
    device = current_device()
    device.engines(PROBLEM, 1)
    assert device.name == "Mine"
    assert DescriptorKind.DEVICEPROP not in no_gpu.kinds()  # which cuDNN has since 9.8, and engines need not
    assert device.properties_json == '{"deviceName": "Here"}'
    (graph,) = (made.content for made in no_gpu.made if made.kind == DescriptorKind.OPERATIONGRAPH)
    (properties,) = (made.content for made in no_gpu.made if made.kind == DescriptorKind.DEVICEPROP)
    assert graph[Attribute.OPERATIONGRAPH_HANDLE] == properties[Attribute.DEVICEPROP_HANDLE] != [0]
    heuristics = [made.content for made in no_gpu.made if made.kind == DescriptorKind.ENGINEHEUR]
    assert not any(Attribute.ENGINEHEUR_DEVICEPROP in content for content in heuristics)
    del device
    gc.collect()
    assert no_gpu.calls.count("cudnnDestroy") == 1


def test_without_a_gpu_the_current_device_says_what_is_missing(no_gpu: FakeCudnn) -> None:
    with pytest.raises(UnavailableError, match=r"no CUDA device .* cudaGetDeviceCount.* see nvidia-smi"):
        current_device()
    gc.collect()
    assert "cudnnDestroy" not in no_gpu.calls


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "No such file"), ("{", "Expecting property name"), ("\xff", "can't decode|Expecting value")],
)
def test_a_file_that_is_no_json_is_refused(no_gpu: FakeCudnn, tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "device.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(InvalidInputError, match=rf"{path} cannot be read .*({reason}).* or one of h200"):
        described_device(str(path))


@pytest.mark.parametrize("lacking", ["warpSize", "deviceName"])
def test_what_cudnn_refuses_says_which_properties_are_lacking(no_gpu: FakeCudnn, tmp_path: Path, lacking: str) -> None:
    known = json.loads((Path(module.__file__).parent / "devices" / "h200.json").read_text())
    path = tmp_path / "device.json"
    path.write_text(json.dumps({key: value for key, value in known.items() if key != lacking}))
    no_gpu.refused["cudnnBackendFinalize"] = (BAD_PARAM, b'!json_object.HasMember("...")')
    with pytest.raises(
        InvalidInputError, match=rf"no device that this cuDNN accepts: .*HasMember.*; it lacks {lacking}$"
    ):
        described_device(str(path))


def test_an_older_cudnn_knows_only_devices_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: FakeCudnn(version=90705))
    monkeypatch.setattr(module, "library", lambda: Library("/old/libcudnn.so.9"))
    with pytest.raises(UnavailableError, match=r"is cuDNN 9\.7\.5, which knows no devices.* 9\.8 or later"):
        described_device("h200")


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


class OnDevice:
    """As much of a CUDA tensor as a step looks at."""

    is_cuda, shape = True, (1,)

    def get_device(self) -> int:
        return 3

    def data_ptr(self) -> int:
        return 64


def test_steps_are_started_on_torchs_current_stream_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, tensor = FakeBackend(), OnDevice()
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(backend, "execute", lambda *arguments: started.append(arguments[1:]))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    CudnnEngine(STEADY, backend).step(FORWARD, tensor, tensor, tensor, None, tensor, tensor)  # type: ignore[arg-type]
    assert started == [(Pointers(64, 64, 64), 64, 1003)]


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
