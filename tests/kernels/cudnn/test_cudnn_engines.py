"""Engine configurations: their names, what is listed and in which order, and of which device."""

from __future__ import annotations

import ctypes
import gc
import json
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cudnn.library import BAD_PARAM, NOT_INITIALIZED, FakeCudnn, FakeEngine, workspace_of

from mucudnn.kernels.cudnn import device as module
from mucudnn.kernels.cudnn.constants import Attribute, BehaviorNote, DescriptorKind, HeuristicMode, NumericalNote
from mucudnn.kernels.cudnn.device import Device, current_device, described_device
from mucudnn.kernels.cudnn.engines import EngineConfig
from mucudnn.kernels.cudnn.library import CudnnError, Library
from mucudnn.words.errors import InvalidInputError, UnavailableError
from mucudnn.words.problem import ConvProblem, Operation

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
