"""``mucudnn explain``, and the headroom as a limit of other commands, through the real entry point."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock.machine import ENVIRONMENT
from support.command_line import HEADING, fail, invoke

from mucudnn.bench.sources import table_tuning
from mucudnn.bench.sources.table_tuning import TableTuning
from mucudnn.words.config import Config

QUICK = ("--algorithms", "gemm", "--time-limit", "20ms")
LAYERS = HEADING + "one,4,8,8,4,3,3,1,1,1,1\ntwo,4,8,8,8,1,1,0,0,1,1\n"
MODELS = """
import torch
from torch import nn

def two():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())

def equal():
    return nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))

def one():
    return nn.Conv2d(3, 8, 3)

def frozen():
    model = two()
    model[0].requires_grad_(False)
    return model

def normalised():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4))

class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) if self.training else self.conv(x)
"""
SIZES = ("--batch", "2", "--input", "3x8x8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``layers.csv`` and ``some_models.py``, and what was measured of them, as a database and as a profile."""
    path = tmp_path_factory.mktemp("explain")
    (path / "layers.csv").write_text(LAYERS)
    (path / "some_models.py").write_text(MODELS)
    options = (*QUICK, "--threads", "1", "--database", path / "full.sqlite")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for source, sizes in (("layers.csv", ("--batch", "2")), ("some_models:two", SIZES)):
            tuned = invoke("tune", source, *sizes, *options, "--thorough")
            assert tuned.exit_code == 0, tuned.output
    exported = invoke("database", "export", path / "profile.csv", "--database", path / "full.sqlite")
    assert exported.exit_code == 0, exported.output
    return path


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(folder)
    yield
    sys.modules.pop("some_models", None)


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def files(folder: Path) -> tuple[object, ...]:
    return "--csv", folder / "out.csv", "--json", folder / "out.json", "--plot", folder / "out.png"


@pytest.mark.parametrize("stored", [(), ("--from", "full.sqlite"), ("--from", "profile.csv")], ids=str)
def test_budget_prints_writes_and_draws(stored: tuple[str, ...], tmp_path: Path) -> None:
    options = (*stored, "--algorithms", "gemm") if stored else (*QUICK, "--threads", "1")
    result = invoke("explain", "layers.csv", "--batch", "2", "--budget", "64KiB", *options, *files(tmp_path))
    assert result.exit_code == 0, result.output
    for expected in ("layers.csv, workspace budget 64 KiB", "next faster", "6 problems: "):
        assert expected in result.output
    record = json.loads((tmp_path / "out.json").read_text())
    rows = lines_of(tmp_path / "out.csv")
    assert [row["chosen"] for row in rows] == [problem["chosen"] for problem in record["problems"]]
    assert sum(int(row["chosen_workspace_bytes"]) for row in rows) <= 64 * 1024
    points = [(int(p["budget_bytes"]), float(p["time_s"])) for p in lines_of(tmp_path / "out-curve.csv")]
    assert points == sorted(points, key=lambda point: (point[0], -point[1]))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("memory_format", ["contiguous", "channels-last"])
def test_headroom_prints_writes_and_draws(memory_format: str, tmp_path: Path) -> None:
    options = (*SIZES, *QUICK, "--threads", "1", "--memory-format", memory_format)
    result = invoke("explain", "some_models:two", "--headroom", *options, *files(tmp_path))
    assert result.exit_code == 0, result.output
    assert "some_models:two: one training step, peak" in result.output
    assert "within PyTorch's own peak" in result.output
    record = json.loads((tmp_path / "out.json").read_text())
    rows = lines_of(tmp_path / "out.csv")
    assert [(row["layer"], row["operation"]) for row in rows] == [
        *(("0", "forward"), ("2", "forward")),
        *(("2", "backward_data"), ("2", "backward_filter"), ("0", "backward_filter")),
    ]
    assert [row["configuration"] for row in rows] == [call["configuration"] for call in record["calls"]]
    assert all(call["configuration"] for call in record["calls"])
    assert all(call["workspace_bytes"] <= call["limit_bytes"] for call in record["calls"])
    assert all(call["in_use_bytes"] + call["limit_bytes"] <= record["peak_bytes"] for call in record["calls"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_headroom_from_what_is_stored_measures_nothing(monkeypatch: pytest.MonkeyPatch, database: Path) -> None:
    monkeypatch.setattr("mucudnn.measuring.timing.timer.WallClock.now", None)
    stored = ("--from", "full.sqlite", "--algorithms", "gemm", "--threads", "1")
    result = invoke("explain", "some_models:two", "--headroom", *SIZES, *stored)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert not database.exists()


@pytest.mark.parametrize("command", [("tune",), ("solve", "full.sqlite", "--network")], ids=str)
def test_the_headroom_limits_each_module(command: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    options = QUICK if command == ("tune",) else ("--algorithms", "gemm")
    database = ("--database", folder / "full.sqlite") if command == ("tune",) else ()
    limit = ("--workspace-limit", "headroom", "--json", tmp_path / "out.json")
    result = invoke(*command, "some_models:two", *SIZES, *options, *database, *limit)
    assert result.exit_code == 0, result.output
    assert "workspace within the headroom" in result.output
    assert [row["layer"] for row in json.loads((tmp_path / "out.json").read_text())["problems"]] == ["0"] * 2 + [
        "2"
    ] * 3


def test_the_memory_of_a_call(tmp_path: Path) -> None:
    options = ("--algorithms", "implicit-gemm", "--database", tmp_path / "new.sqlite")
    result = invoke("explain", "some_models:two", "--memory", *SIZES, *options, *files(tmp_path))
    assert result.exit_code == 0, result.output
    assert "measured without a budget:" in result.output
    front = json.loads((tmp_path / "out.json").read_text())["front"]
    assert [row["memory_bytes"] for row in front] == sorted(row["memory_bytes"] for row in front)


@pytest.mark.parametrize("memory", ["--headroom", "--budget=1MiB"])
def test_ctrl_c_says_that_nothing_is_lost(memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = TableTuning("some_models:two", Config(), ENVIRONMENT, (), wanted=5)
    monkeypatch.setattr(table_tuning, "tune_table", lambda *_, **__: partial)
    result = invoke("explain", "some_models:two", memory, *SIZES, *files(tmp_path))
    assert result.exit_code == 130
    assert "0 of 5 are ready. All measurements are kept; run the same command again" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_step_and_the_tuning_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, real = [], table_tuning.table_with_headroom

    def traced(source: str, *, device: str, **sizes: Any) -> Any:
        devices.append(device)
        return real(source, **sizes)

    def interrupted(*_: object, device: str, **__: object) -> TableTuning:
        devices.append(device)
        return TableTuning("some_models:two", Config(), ENVIRONMENT, (), wanted=5)

    monkeypatch.setattr("mucudnn.cli.explain.tuning_environment", lambda device, config: devices.append(device))
    monkeypatch.setattr(table_tuning, "table_with_headroom", traced)
    monkeypatch.setattr(table_tuning, "tune_table", interrupted)
    for memory in ("--headroom", "--budget=1MiB"):
        assert invoke("explain", "some_models:two", memory, *SIZES, "--device", "cuda").exit_code == 130
    assert {*devices} == {"cuda"}
    assert len(devices) > 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "give one of --budget SIZE, --headroom or --memory"),
        (
            ("--budget", "1MiB", "--headroom"),
            "give one of --budget SIZE, --headroom or --memory",
        ),
        (("--budget", "none"), "'none' is not a size; give one, such as 64MiB"),
        (("--budget", "much"), "'much' is not understood"),
        (("--budget", "1B", "--algorithms", "gemm"), "Raise the workspace budget to"),
        (("--budget", "1MiB", "--workspace-limit", "1MiB"), "No such option '--workspace-limit'"),
        (("--budget", "1MiB", "--environment", "a cpu"), "--environment picks from the measurements of --from"),
        (("--budget", "1MiB", "--from", "full.sqlite", "--database", "mine.sqlite"), "or --database, not both"),
        (
            ("--budget", "1MiB", "--from", "full.sqlite", "--device", "cuda"),
            "measures nothing, on no device: give it or --dev",
        ),
        (("--budget", "1MiB", "--from", "missing.sqlite"), "missing.sqlite cannot be read"),
        (("--budget", "1MiB", "--from", "some_models.py"), "some_models.py is neither a database nor a profile"),
        (("--budget", "1MiB", "--from", "full.sqlite", "--dtype", "float64"), "not measured"),
        (("--budget", "1MiB", "--plot", "out.svg"), "'out.svg' is not a PNG file; name one that ends in .png"),
        (("--memory", "--from", "full.sqlite"), "--memory runs the model, on the CPU: leave out --from and --device"),
        (("--memory",), "layers.csv has no model to run; name one of alexnet"),
        (("--headroom",), "layers.csv has no model to run; name one of alexnet"),
    ],
)
def test_bad_values(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in fail("explain", "layers.csv", "--batch", "2", *arguments)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("deepbench-train", "deepbench-train has no model to run"),
        ("some_models:normalised", "cannot be trained on an input of 1x3x8x8: Expected more than 1 value"),
        ("some_models:Idle", "runs no convolution in a training step: there is no headroom to use"),
    ],
)
def test_sources_without_a_step_say_so(source: str, expected: str, database: Path) -> None:
    shape = ("--input", "3x8x8") if ":" in source else ()
    assert expected in fail("explain", source, "--batch", "1", "--headroom", *shape)
    assert not database.exists()


@pytest.mark.parametrize("command", [("bench", "inference")], ids=str)
def test_commands_without_a_step_refuse_the_headroom(command: tuple[str, ...], database: Path) -> None:
    message = fail(*command, "alexnet", "--workspace-limit", "headroom")
    assert "this command runs none; give a size, such as 64MiB, or none" in message
    assert not database.exists()
