"""``mucudnn engines`` and its list, on what cuDNN 9.19 offered for an H200; and what the list is asked for wrongly."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.command_line import HEADING, fail, invoke
from support.cudnn.recording import MICRO_BATCH_SIZES, RecordedDevice, recorded_device, recorded_offers
from support.snapshots import assert_as_stored

from mucudnn.bench.analyses.engines import list_engines
from mucudnn.kernels.cudnn import device as module
from mucudnn.kernels.cudnn import library as library_module
from mucudnn.kernels.cudnn.constants import NumericalNote
from mucudnn.kernels.cudnn.engines import Engine, EngineConfig
from mucudnn.kernels.cudnn.library import CudnnError
from mucudnn.words.errors import UnavailableError
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.torch_settings import TorchSettings

LAYERS = HEADING + "conv3_1,128,56,56,256,3,3,1,1,1,1\none,256,56,56,64,1,1,0,0,1,1\n"
PROBLEM = ConvProblem(Operation.FORWARD, 128, 56, 56, 256, 3, 3, padding=(1, 1))
SIZES = ("--micro-batches", "1,4,32", "--device-properties", "h200")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordedDevice:
    """The recorded one, and ``layers.csv`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("layers.csv").write_text(LAYERS)
    device = recorded_device()
    monkeypatch.setattr(module, "described_device", lambda description: device)
    return device


def test_the_list_is_what_was_offered_at_each_size_and_nothing_else() -> None:
    for problem in (PROBLEM, replace(PROBLEM, operation=Operation.BACKWARD_FILTER, dtype="float16")):
        listed = list_engines(recorded_device(), ("conv",), problem, MICRO_BATCH_SIZES).engines
        for n in MICRO_BATCH_SIZES:
            offered = recorded_offers()[problem][n]
            assert {
                (entry.engine.config, entry.workspace_bytes[n]) for entry in listed if n in entry.workspace_bytes
            } == {(engine.config, engine.workspace_bytes) for engine in offered}
        largest = [engine.config for engine in recorded_offers()[problem][32]]
        assert [entry.engine.config for entry in listed][: len(largest)] == largest


def test_without_tf32_only_exact_engines_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchSettings, "current", classmethod(lambda cls: cls(allow_tf32=False)))
    for operation in Operation:
        listed = list_engines(recorded_device(), ("conv",), PROBLEM.with_operation(operation), (4,))
        assert 0 < listed.allowed < len(listed.engines)
        assert all((entry.barred is None) != entry.engine.uses_tensor_cores for entry in listed.engines)


def test_engines_of_different_notes_are_not_mixed_up() -> None:
    config = EngineConfig(1)
    exact, rounding = (
        Engine(config, frozenset(notes), frozenset(), n) for n, notes in ((1, ()), (2, (NumericalNote.TENSOR_CORE,)))
    )
    device = replace(recorded_device(), offers={PROBLEM: {1: [exact], 2: [rounding]}})
    listed = list_engines(device, ("conv",), PROBLEM, (1, 2)).engines
    assert [(entry.engine, dict(entry.workspace_bytes)) for entry in listed] == [(rounding, {2: 2}), (exact, {1: 1})]


def raising(status: int) -> RecordedDevice:
    """At micro-batch size 4."""

    class Raising(RecordedDevice):
        def engines(self, problem: ConvProblem, n: int, *, every: bool = False) -> list[Engine]:
            if n == 4:
                raise CudnnError("finalize ENGINEHEUR", status, "CUDNN_STATUS", "")
            return super().engines(problem, n, every=every)

    recorded = recorded_device()
    return Raising(recorded.name, SimpleNamespace(version_text="9.19.0"), recorded.offers)


def test_a_size_that_cudnn_does_not_support_stays_blank_and_what_is_wrong_is_raised() -> None:
    listed = list_engines(raising(3000), ("conv",), PROBLEM, (1, 4)).engines
    assert {n for entry in listed for n in entry.workspace_bytes} == {1}
    with pytest.raises(UnavailableError, match="has no engine for forward 128x56x56"):
        list_engines(raising(3000), ("conv",), PROBLEM, (4,))
    with pytest.raises(CudnnError):
        list_engines(raising(2000), ("conv",), PROBLEM, (1, 4))


def test_the_command_prints_engines_notes_and_workspace(device: RecordedDevice) -> None:
    result = invoke("engines", "layers.csv", "--layer", "conv3_1", "--operation", "backward-filter", *SIZES)
    assert result.exit_code == 0, result.output
    assert_as_stored("engines", result.output)  # no engine has notes on its behaviour, nor is any barred
    offered = {
        engine.config
        for by_size in device.offers[PROBLEM.with_operation(Operation.BACKWARD_FILTER)].values()
        for engine in by_size
    }
    assert f"{len(offered)} engine configurations, {len(offered)} allowed" in result.output


def test_files_have_every_number(device: RecordedDevice) -> None:
    result = invoke("engines", "layers.csv", "--layer", "one", *SIZES, "--csv", "e.csv", "--json", "e.json")
    assert result.exit_code == 0, result.output
    problem = ConvProblem(Operation.FORWARD, 256, 56, 56, 64, 1, 1)
    expected = {
        (str(n), engine.config.name, str(engine.workspace_bytes))
        for n, offered in device.offers[problem].items()
        for engine in offered
    }
    with Path("e.csv").open(encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    assert {(line["micro_batch_size"], line["engine"], line["workspace_bytes"]) for line in lines} == expected
    record = json.loads(Path("e.json").read_text())
    assert (record["device"], record["cudnn"], record["layer"]) == ("NVIDIA H200", "9.19.0", "one")
    assert {
        (n, entry["engine"], str(needed))
        for entry in record["engines"]
        for n, needed in entry["workspace_bytes"].items()
    } == expected


def test_sizes_are_powers_of_two_up_to_the_batch_or_as_given(device: RecordedDevice) -> None:
    Path("batch.csv").write_text(HEADING.replace("name", "name,n") + "a,3,128,56,56,256,3,3,1,1,1,1\n")
    device.offers = {PROBLEM: dict.fromkeys(range(1, 9), device.offers[PROBLEM][1])}
    for given, sizes in (((), [1, 2, 3]), (("--batch", "4"), [1, 2, 4]), (("--micro-batches", "8,1,8"), [1, 8])):
        device.asked.clear()
        result = invoke("engines", "batch.csv", "--device-properties", "h200", "--all", *given)
        assert result.exit_code == 0, result.output
        assert sorted(device.asked) == [(n, True) for n in sizes]


def test_wrong_layers_and_sizes_are_usage_errors(device: RecordedDevice) -> None:
    message = fail("engines", "layers.csv", "--layer", "conv3", *SIZES)
    assert "layers.csv has no layer 'conv3'; did you mean conv3_1? give --layer NAME, one of conv3_1, one" in message
    assert "give --layer NAME, one of conv3_1, one" in fail("engines", "layers.csv", *SIZES)
    for sizes in ("", "0", "1,x", "-1", "1.5"):
        assert "not a list of whole" in fail("engines", "layers.csv", "--layer", "one", f"--micro-batches={sizes}")
    assert "give --batch or --micro-batches, not both" in fail("engines", "layers.csv", "--batch", "2", *SIZES)


def test_without_a_gpu_the_command_has_a_remedy_unless_cudnn_is_missing_too(
    device: RecordedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(reason: str) -> Callable[[], None]:
        def refuse() -> None:
            raise UnavailableError(reason)

        return refuse

    monkeypatch.setattr(library_module, "library", lambda: None)
    monkeypatch.setattr(module, "current_device", unavailable("no CUDA device can be used here"))
    message = fail("engines", "layers.csv", "--layer", "one")
    assert "no CUDA device can be used here; --device-properties lists the engines of a GPU that is not here" in message
    monkeypatch.setattr(library_module, "library", unavailable("there is no cuDNN"))
    assert fail("engines", "layers.csv", "--layer", "one").endswith("there is no cuDNN")
