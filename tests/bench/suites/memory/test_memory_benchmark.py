"""The memory benchmark: what is measured and told; on tiny models."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clock.ticking import TickingClock
from support.command_line import invoke
from support.in_threads import InThreads
from support.snapshots import assert_as_stored, printed
from torch import nn

from mucudnn.bench.contests.variants import Variant
from mucudnn.bench.folders.reading import ResultFolder, read_folder, read_result_file
from mucudnn.bench.suites import memory as memory_benchmark
from mucudnn.bench.suites.memory import benchmark_memory, memory_tables
from mucudnn.kernels.compiled.library import loaded_build
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
"""


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))


X = torch.randn(2, 3, 12, 12)


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    """Contestants are in threads, and what is compiled is so without machine code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_benchmark, "Apart", InThreads)
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        yield


def measured(out: Path, config: Config = CONFIG, model: nn.Module | None = None, **given: Any) -> ResultFolder:
    given = {"rounds": 2, "runs": 0, **given}
    benchmark_memory(model or tiny(), (X,), config, out / "folder", name="tiny", **given)
    return read_folder(out / "folder")


@pytest.fixture(scope="module")
def found(quickly: None, tmp_path_factory: pytest.TempPathFactory) -> ResultFolder:
    """And the model stays as it is."""
    torch.set_num_threads(1)
    path, model = tmp_path_factory.mktemp("memory"), tiny().eval()
    state, seen = {name: tensor.clone() for name, tensor in model.state_dict().items()}, list[str]()
    config = replace(CONFIG, database=path / "database.sqlite")
    told: dict[str, Any] = {"clock": TickingClock(), "progress": lambda text, fraction: seen.append(text)}
    found = measured(path, config, model, rounds=3, **told)
    assert not model.training
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert {type(module) for module in model} == {nn.Conv2d, nn.BatchNorm2d, nn.ReLU}
    assert seen[-2:] == ["peaks of memory", "training steps"]
    return found


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``trained_models`` in the current folder."""
    (tmp_path / "trained_models.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("trained_models", None)


def who(folder: ResultFolder) -> list[tuple[str, str | None]]:
    """The contestants beside torch, and their bounds."""
    return [(line["contestant"], line["bound"]) for line in folder.lines[1:]]


HEADROOM, LIMIT = "workspace within the headroom", "workspace limit 64 MiB"


def test_all_run_and_ours_with_a_limit_stands_beside_the_headroom(found: ResultFolder) -> None:
    assert who(found) == [
        *(("torch-compile", None), ("mucudnn", HEADROOM), ("mucudnn", LIMIT), ("mucudnn-compile", HEADROOM))
    ]
    for line in found.lines:
        assert line["samples_s"] == [1.0] * 3  # by this clock every step takes as long
        assert line["allocator_peak_bytes"]
        assert line["resident_peak_bytes"] is None
    assert found.lines[2]["allocator_peak_bytes"] <= found.lines[0]["allocator_peak_bytes"]
    assert found.left_out == ()


def test_a_limit_stands_beside_a_budget_and_a_failed_contestant_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_(model: nn.Module) -> nn.Module:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", compile_)
    config = replace(CONFIG, workspace_limit="64MiB", workspace_budget="1MiB")
    found = measured(tmp_path, config, variants=[Variant.TORCH_COMPILE, Variant.MUCUDNN])
    assert who(found) == [("torch-compile", None), ("mucudnn", "workspace budget 1 MiB"), ("mucudnn", LIMIT)]
    _, failed, ours, _ = found.lines
    assert (failed["failure"], failed["allocator_peak_bytes"], failed["samples_s"]) == ("no compiler", None, [])
    assert (ours["failure"], len(ours["samples_s"])) == (None, 2)
    table, words = map(printed, memory_tables(found))
    assert "torch-compile: no compiler" in words
    assert "no compiler" in table


def test_calls_within_a_memory_budget_stand_beside_calls_without(tmp_path: Path) -> None:
    if reason := loaded_build().why_not_compiled:
        pytest.skip(f"only compiled algorithms run bands in few bytes: {reason}")
    config = Config(memory_budget="20KiB", algorithms=("implicit-gemm",), time_limit="20ms", confirm=False)
    found = measured(tmp_path, replace(config, database=tmp_path / "database.sqlite"), tiny().eval())
    assert [name for name, _ in who(found)] == ["torch-compile", "mucudnn", "mucudnn"]
    torchs, _, ours, _ = found.lines
    assert ours["bound"] == "memory budget 20 KiB"
    y_bytes = 2 * 8 * 10 * 10 * 4
    assert ours["allocator_peak_bytes"] - y_bytes <= 20 * 2**10 < torchs["allocator_peak_bytes"] - y_bytes
    assert "tiny, batch 2: one call" in printed(next(memory_tables(found)))


def test_without_torch_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.bench.suites.memory.allocator_peak_bytes", lambda *_: 1 / 0)
    with pytest.raises(UnavailableError, match="PyTorch, with which all others are compared, fails: division by zero"):
        measured(tmp_path, variants=[])
    assert not read_folder(tmp_path / "folder").lines


def test_the_table_and_the_words(found: ResultFolder) -> None:
    """Which algorithms were chosen, and so the memory of ours, is the machine's affair."""
    mib = [4, *(3 for _ in found.lines[1:])]
    peaks = [{"allocator_peak_bytes": n * 2**20, "resident_peak_bytes": (396 + n) * 2**20} for n in mib]
    lines = tuple(line | known for line, known in zip(found.lines, peaks, strict=True))
    shown = [*memory_tables(replace(found, lines=lines))]
    assert_as_stored("bench-memory", *shown)
    assert "resident" not in str(shown[-1])


def test_the_command_measures_a_model_of_ones_own(
    own_model: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--input", "3x8x8", "--runs", "1", *QUICK, "--json", "out.json", "--memory-format", "channels-last")
    options += ("--out", "folder")
    result = invoke("bench", "memory", "trained_models:make", *options)
    assert result.exit_code == 0, result.output
    assert "trained_models:make, batch 2: one training step" in result.output
    assert "resident: of a whole process, median of 1" in result.output
    lines = read_result_file(tmp_path / "out.json").lines
    assert [(line["contestant"], line["bound"]) for line in lines] == [
        *(("torch", None), ("mucudnn", HEADROOM), ("mucudnn", LIMIT))
    ]
    assert all(line["resident_peak_bytes"] > 2**20 and line["memory_format"] == "channels_last" for line in lines)
    assert read_folder(tmp_path / "folder").lines == lines
    monkeypatch.setattr(memory_benchmark, "Apart", None)
    again = invoke("bench", "memory", "trained_models:make", *options)  # what the folder has
    assert again.stdout == result.stdout
