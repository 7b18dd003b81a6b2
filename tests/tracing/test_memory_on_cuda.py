"""Peaks and benchmarks of memory with a model on CUDA: which device is asked, and that no process is started.

There is none here: a CPU model counts as one there, and the allocator's counters are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock.machine import ENVIRONMENT
from support.clock.ticking import TickingClock
from support.command_line import fail
from support.in_threads import InThreads
from torch import nn

import mucudnn
from mucudnn.bench.contests import peak_memory
from mucudnn.bench.contests.variants import Variant
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.sources import table_tuning
from mucudnn.bench.suites import memory as memory_benchmark
from mucudnn.bench.suites.memory import benchmark_memory
from mucudnn.cli.shared import layer_tables
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError

GPU = torch.device("cuda", 1)
SIZES = {"batch": 2, "input_shape": None, "dtype": "float32"}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was asked of the device, in order, each with the one that was current."""
    current: list[object] = []
    asked: list[object] = []

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def peak_allocated_bytes(step: Callable[[], object], device_type: str) -> int:
        step()
        asked.append((device_type, current[-1]))
        return 2**20

    for module in (memory_benchmark,):
        monkeypatch.setattr(module, "device_of", lambda model: GPU)
        monkeypatch.setattr(module, "made_current", made_current)
    monkeypatch.setattr(peak_memory, "peak_allocated_bytes", peak_allocated_bytes)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(("emptied", current[-1])))
    return asked


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())


def test_the_benchmark_is_of_the_models_own_gpu_and_of_no_process(
    on_gpu: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = replace(ENVIRONMENT, device="a GPU")
    monkeypatch.setattr(memory_benchmark, "current_environment", lambda device: environment)
    monkeypatch.setattr(mucudnn, "optimize", lambda model, x, config, progress: model)
    monkeypatch.setattr(memory_benchmark, "Apart", InThreads)
    variants = [Variant.TORCH_BENCHMARK, Variant.MUCUDNN]
    config = Config(workspace_limit="headroom")
    benchmark_memory(
        tiny(), (torch.randn(1, 3, 8, 8),), config, tmp_path, runs=3, rounds=2, variants=variants, clock=TickingClock()
    )
    found = read_folder(tmp_path)
    assert found.header.environment == environment
    assert found.header.settings["runs"] == 0
    assert {line["resident_peak_bytes"] for line in found.lines} == {None}
    assert [line["contestant"] for line in found.lines] == ["torch", "torch-benchmark", "mucudnn", "mucudnn"]
    assert on_gpu == [("emptied", GPU), ("cuda", GPU)] * 4


def test_the_headroom_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def find_headroom(model: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
        (x,) = arguments
        seen.extend((x.device.type, {parameter.device.type for parameter in model.parameters()}))
        raise UnavailableError("stopped")

    monkeypatch.setattr(table_tuning, "find_headroom", find_headroom)
    with pytest.raises(UnavailableError, match="stopped"):
        layer_tables.load_limited("alexnet", SIZES, Config(workspace_limit="headroom"), "meta")
    assert seen == ["meta", {"meta"}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command", [("bench", "memory", "alexnet"), ("tune", "alexnet", "--workspace-limit", "headroom")], ids=" ".join
)
def test_without_one_the_commands_say_so_before_anything_is_loaded(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mucudnn.bench.sources.models.load_model", lambda *_, **__: 1 / 0)
    message = fail(*command, "--device", "cuda")
    assert "device is 'cuda', but torch" in message
    assert "use device 'cpu'" in message
