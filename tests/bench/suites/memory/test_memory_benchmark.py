"""The memory benchmark: what is measured, told and recorded; on tiny models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock.ticking import TickingClock
from support.command_line import fail, invoke
from support.in_threads import InThreads
from support.snapshots import assert_as_stored, printed
from torch import Tensor, nn

from mucudnn.bench.contests.apart import Apart
from mucudnn.bench.contests.variants import Variant
from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.sources import networks
from mucudnn.bench.suites.memory import benchmark as memory_benchmark
from mucudnn.bench.suites.memory.benchmark import benchmark_memory
from mucudnn.bench.suites.memory.report import in_words, memory_record, memory_table
from mucudnn.bench.suites.memory.result import MemoryBenchmark, StepMemory
from mucudnn.words.config import Config
from mucudnn.words.errors import UnavailableError

CONFIG = Config(workspace_limit="headroom", algorithms=("gemm",), time_limit="20ms")
QUICK = ("--algorithms", "gemm", "--time-limit", "20ms", "--threads", "1", "--rounds", "2", "--batch", "2")
QUICK += ("--variants", "mucudnn")
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


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    """Contestants are in threads, and what is compiled is so without machine code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_benchmark, "Apart", InThreads)
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        yield


@pytest.fixture(scope="module")
def benchmark(quickly: None, tmp_path_factory: pytest.TempPathFactory) -> MemoryBenchmark:
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


def who(benchmark: MemoryBenchmark) -> list[tuple[str, str | None]]:
    """The contestants beside torch, and their bounds."""
    found = (one.contestant for one in benchmark.others)
    return [(one.variant, one.config and (one.config.workspace_budget or one.config.workspace_limit)) for one in found]


def test_all_run_and_ours_with_a_limit_stands_beside_the_headroom(benchmark: MemoryBenchmark) -> None:
    assert who(benchmark) == [
        *(("torch-compile", None), ("mucudnn", "headroom"), ("mucudnn", "64MiB"), ("mucudnn-compile", "headroom"))
    ]
    for one in (benchmark.torchs, *benchmark.others):
        step = benchmark.step(one)
        assert step is not None
        assert (step.speedup, step.rounds) == (1.0, 3)  # by this clock every step takes as long
        assert one.allocator_bytes
        assert one.resident_bytes is None
    headroom = benchmark.others[1]
    assert benchmark.allocator_ratio(headroom) <= 1  # type: ignore[operator]
    assert benchmark.allocator_ratio(benchmark.torchs) == 1


def test_nothing_stands_beside_the_same_limit(x: Tensor) -> None:
    config = replace(CONFIG, workspace_limit="64MiB")
    found = benchmark_memory(tiny(), x, config, rounds=2, runs=0, variants=[Variant.MUCUDNN])
    assert who(found) == [("mucudnn", "64MiB")]
    assert found.others[0].contestant.config == config


def test_a_budget_stands_beside_a_limit(x: Tensor) -> None:
    config = replace(CONFIG, workspace_limit="64MiB", workspace_budget="1MiB")
    found = benchmark_memory(tiny(), x, config, rounds=2, runs=0, variants=[Variant.MUCUDNN])
    assert who(found) == [("mucudnn", "1MiB"), ("mucudnn", "64MiB")]


def test_one_that_fails_is_told_and_the_others_go_on(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(model: nn.Module) -> nn.Module:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", compile_)
    variants = [Variant.TORCH_COMPILE, Variant.MUCUDNN]
    config = replace(CONFIG, workspace_limit="64MiB")
    found = benchmark_memory(tiny(), x, config, rounds=2, runs=0, variants=variants)
    failed, ours = found.others
    assert (failed.failure, failed.allocator_bytes, found.step(failed)) == ("no compiler", None, None)
    assert (ours.failure, len(ours.samples_s)) == ("", 2)
    assert "torch-compile: no compiler" in in_words(found)
    assert "no compiler" in printed(memory_table(found))
    assert memory_record(found)["variants"][0]["failure"] == "no compiler"


def test_without_torch_nothing_is_compared(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.bench.suites.memory.step_job.allocator_peak_bytes", lambda *_: 1 / 0)
    with pytest.raises(UnavailableError, match="torch, with which all others are compared, fails: division by zero"):
        benchmark_memory(tiny(), x, CONFIG, rounds=2, runs=0, variants=[])


def test_the_model_stays_as_it_is(x: Tensor) -> None:
    model, seen = tiny().eval(), []
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    benchmark_memory(
        *(model, x, CONFIG),
        rounds=2,
        runs=0,
        variants=[Variant.MUCUDNN],
        progress=lambda text, fraction: seen.append(text),
    )
    assert not model.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {type(module) for module in model} == {nn.Conv2d, nn.BatchNorm2d, nn.ReLU}
    assert seen[-2:] == ["peaks of memory", "training steps"]


def test_the_table_the_words_and_the_record_agree(benchmark: MemoryBenchmark, tmp_path: Path) -> None:
    """Which algorithms were chosen, and so the memory of ours, is the machine's affair."""

    def known(one: StepMemory, mib: int) -> StepMemory:
        return replace(one, allocator_bytes=mib * 2**20, resident_bytes=(396 + mib) * 2**20)

    others = tuple(known(one, 3) for one in benchmark.others)
    benchmark = replace(benchmark, torchs=known(benchmark.torchs, 4), others=others)
    assert_as_stored("bench-memory", memory_table(benchmark), in_words(benchmark))
    record: Any = json.loads(json.dumps(memory_record(benchmark)))
    for one in record["variants"]:
        name = one["variant"].replace("-", "_")
        assert (one["allocator_ratio"], one["resident_ratio"]) == (3 / 4, 399 / 400)
        assert (one[f"{name}_allocator_bytes"], one["torch_allocator_bytes"]) == (3 * 2**20, 4 * 2**20)
        assert one[f"{name}_step_s"] == one["torch_step_s"] == 1.0
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
        (("trained_models:normalised", "--input", "3x8x8"), "cannot be trained on an input of 1x3x8x8: Expected"),
        (("trained_models:make",), "give --input, for example --input 3x224x224"),
        (("trained_models:make", "--input", "3x8x8", "--runs", "-1"), "-1 is not in the range x>=0"),
        (("trained_models:make", "--input", "3x8x8", "--workspace-limit", "much"), "'much' is not understood"),
    ],
)
def test_bad_values(arguments: tuple[str, ...], expected: str, own_model: None) -> None:
    assert expected in fail("bench", "memory", *arguments)


def test_models_that_cannot_be_pickled_have_no_process_of_their_own(
    own_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_benchmark, "Apart", Apart)
    message = fail("bench", "memory", "trained_models:unpicklable", "--input", "3x8x8", *QUICK)
    assert "each contestant has a process of its own, for which the model cannot be pickled" in message
