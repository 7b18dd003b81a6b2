"""The memory benchmark: what is measured, told and recorded; on tiny models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock.ticking import TickingClock
from support.command_line import fail, invoke
from support.snapshots import assert_as_stored, printed
from torch import Tensor, nn

from mucudnn.bench.contests.peak_memory import PeakComparison
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.sources import networks
from mucudnn.bench.suites.memory.benchmark import benchmark_memory
from mucudnn.bench.suites.memory.report import in_words, memory_record, memory_table
from mucudnn.bench.suites.memory.result import MemoryBenchmark
from mucudnn.words.config import Config

CONFIG = Config(workspace_limit="headroom", algorithms=("gemm",), time_limit="20ms")
PEAKS = PeakComparison(4 * 2**20, 3 * 2**20, 400 * 2**20, 399 * 2**20)
QUICK = ("--algorithms", "gemm", "--time-limit", "20ms", "--threads", "1", "--rounds", "2", "--batch", "2")
MODEL = """
from torch import nn

class Own(nn.Sequential):
    pass

def make():
    return Own(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))

def normalised():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4))

def unpicklable():
    model = make()
    model.hook = lambda: None
    return model
"""


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 12, 12)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> MemoryBenchmark:
    torch.set_num_threads(1)
    config = replace(CONFIG, database=tmp_path_factory.mktemp("database") / "measurements.sqlite")
    return benchmark_memory(
        tiny(), torch.randn(2, 3, 12, 12), config, name="tiny", rounds=3, runs=0, clock=TickingClock()
    )


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``trained_models`` in the current folder."""
    (tmp_path / "trained_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("trained_models", None)


def test_the_headroom_stands_beside_a_limit(benchmark: MemoryBenchmark) -> None:
    assert [variant.config.workspace_limit for variant in benchmark.variants] == ["headroom", "64MiB"]
    first, second = benchmark.variants
    assert first.peaks.torch_allocator_bytes == second.peaks.torch_allocator_bytes
    assert first.peaks.allocator_ratio <= 1
    for variant in benchmark.variants:
        assert (variant.step.speedup, variant.step.rounds) == (1.0, 3)  # by this clock every step takes as long
        assert variant.peaks.torch_resident_bytes is None


def test_nothing_stands_beside_the_same_limit(x: Tensor) -> None:
    config = replace(CONFIG, workspace_limit="64MiB")
    (variant,) = benchmark_memory(tiny(), x, config, rounds=2, runs=0).variants
    assert variant.config == config


def test_a_budget_stands_beside_a_limit(x: Tensor) -> None:
    config = replace(CONFIG, workspace_limit="64MiB", workspace_budget="1MiB")
    variants = benchmark_memory(tiny(), x, config, rounds=2, runs=0).variants
    assert [v.config.workspace_budget for v in variants] == ["1MiB", None]


def test_the_model_stays_as_it_is(x: Tensor) -> None:
    model, seen = tiny().eval(), []
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    benchmark_memory(model, x, CONFIG, rounds=2, runs=0, progress=lambda text, fraction: seen.append(text))
    assert not model.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {type(module) for module in model} == {nn.Conv2d, nn.BatchNorm2d, nn.ReLU}
    assert seen[-2:] == ["peaks of memory", "training steps"]


def test_the_table_the_words_and_the_record_agree(benchmark: MemoryBenchmark) -> None:
    """Which algorithms were chosen, and so the memory of ours, is the machine's affair."""
    headroom, limit = (replace(variant, peaks=PEAKS) for variant in benchmark.variants)
    known = replace(benchmark, variants=(headroom, limit))
    assert_as_stored("bench-memory", memory_table(known), in_words(known))
    record: Any = json.loads(json.dumps(memory_record(benchmark)))
    for variant in record["variants"]:
        assert f"{variant['allocator_ratio']:.3f}" in printed(memory_table(benchmark))
        assert f"{variant['allocator_ratio']:.3f} of torch's memory, 1.00× as fast" in in_words(benchmark)
        assert variant["mucudnn_step_s"] == variant["torch_step_s"] == 1.0
    assert record["input_shape"] == [2, 3, 12, 12]
    assert {"date", "environment", "config", "mucudnn", "format_version"} <= record.keys()
    assert "resident" not in in_words(benchmark)


def test_the_command_measures_a_model_of_ones_own(
    own_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--input", "3x8x8", "--runs", "1", *QUICK, "--json", "out.json", "--memory-format", "channels-last")
    options += ("--out", "folder")
    result = invoke("bench", "memory", "trained_models:make", *options)
    assert result.exit_code == 0, result.output
    assert "trained_models:make, batch 2: one training step" in result.output
    assert "resident: of a whole process, median of 1" in result.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert [variant["workspace_limit"] for variant in record["variants"]] == ["headroom", "64MiB"]
    assert all(variant["torch_resident_bytes"] > 2**20 for variant in record["variants"])
    rows = read_folder(tmp_path / "folder").rows
    assert list(rows["contestant"]) == ["torch", "mucudnn", "mucudnn"]
    assert {len(samples) for samples in rows["samples_s"]} == {2}
    monkeypatch.setattr("mucudnn.bench.suites.memory.benchmark.benchmark_memory", None)
    again = invoke("bench", "memory", "trained_models:make", *options)  # what the folder has
    assert again.output == result.output


def test_the_command_measures_a_network_with_sensible_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def stop(model: nn.Module, arguments: tuple[Tensor], config: Config, **_: object) -> None:
        seen.append((model, *arguments, config))
        raise KeyboardInterrupt

    monkeypatch.setattr(networks, "build", lambda name: tiny())
    monkeypatch.setattr("mucudnn.bench.suites.memory.benchmark.benchmark_memory", stop)
    for _ in range(2):
        assert invoke("bench", "memory", "alexnet", "--batch", "3").exit_code == 130
    (model, x, config), (again, _, _) = seen
    assert (tuple(x.shape), config.workspace_limit) == ((3, 3, 224, 224), "headroom")
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("layers.csv",), "layers.csv"),
        (("trained_models:normalised", "--input", "3x8x8"), "cannot be trained on an input of 1x3x8x8: ValueError"),
        (("trained_models:make",), "give --input, for example --input 3x224x224"),
        (("trained_models:make", "--input", "3x8x8", "--runs", "-1"), "-1 is not in the range x>=0"),
        (("trained_models:make", "--input", "3x8x8", "--workspace-limit", "much"), "'much' is not understood"),
    ],
)
def test_bad_values(arguments: tuple[str, ...], expected: str, own_model: None) -> None:
    assert expected in fail("bench", "memory", *arguments)


def test_models_that_cannot_be_pickled_have_no_resident_peak(own_model: None) -> None:
    options = ("trained_models:unpicklable", "--input", "3x8x8", *QUICK)
    message = fail("bench", "memory", *options, "--runs", "1")
    assert "for which the model cannot be pickled: ask for 0 runs" in message
    assert invoke("bench", "memory", *options, "--runs", "0").exit_code == 0
