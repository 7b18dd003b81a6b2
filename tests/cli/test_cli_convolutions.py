"""``mucudnn bench convolutions`` through its real entry point."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.command_line import HEADING, invoke

from mucudnn.bench.results.bounds import MachineLimits
from mucudnn.bench.results.reading import read_folder
from mucudnn.bench.suites import convolutions as module
from mucudnn.core.config import BatchSizePolicy
from mucudnn.core.problem import Operation

SMALL = ("--batch", "2", "--algorithms", "gemm", "--time-limit", "50ms", "--threads", "1", "--rounds", "1")


@pytest.fixture(autouse=True)
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring those of this machine takes seconds."""
    monkeypatch.setattr(MachineLimits, "measured", lambda device, dtype: MachineLimits(1e9, 1e9))


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "layers.csv"
    path.write_text(HEADING + "one,4,8,8,4,3,3,1,1,1,1\ntwo,4,8,8,4,1,1,0,0,1,1\nthree,4,8,8,4,5,5,2,2,1,1\n")
    return path


def test_the_comparison_is_printed_and_kept(layers: Path, tmp_path: Path) -> None:
    asked = ("bench", "convolutions", layers, *SMALL, "--workspace-limit", "1KiB,none", "--operations", "forward")
    asked = (*asked, "--filter", "3x3,5x5", "--memory-format", "contiguous", "--out", tmp_path / "folder")
    result = invoke(*asked)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1].startswith("better PyTorch / better mucudnn: ")
    folder = read_folder(tmp_path / "folder")
    assert (folder.header.benchmark, folder.header.source, folder.problems) == ("convolutions", str(layers), ())
    assert folder.header.settings["workspace_limit"] == [1024, None]
    assert folder.header.limits["float32"].are_known
    keys = {(row["layer"], row["contestant"], row["limit_bytes"]) for row in folder.lines}
    ours = {*product(("one", "three"), ("undivided", "mucudnn"), (1024, None))}
    assert keys == ours | {("one", "torch", None), ("three", "torch", None)}
    assert all(bool(row["samples_s"]) != bool(row["failure"]) for row in folder.lines)
    assert invoke(*asked).exit_code == 0
    assert read_folder(tmp_path / "folder").lines == folder.lines
    assert "power-of-two" in invoke("report", tmp_path / "folder").output


def test_settings_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(module, "benchmark_convolutions", lambda *args, **rest: seen.append((args, rest)))
    asked = ("--filter", "3x3,5x5", "--batch", "256", "--run-time-limit", "90s", "--device", "cuda")
    kinds = "--dtype bfloat16,float32 --workspace-budget 1GiB --policy all --workspace-limit 8MiB"
    assert invoke("bench", "convolutions", "deepbench-train", *asked, *kinds.split()).exit_code == 0
    ((table, config, choices, _), rest) = seen[0]
    assert (table.source, rest["device"], config.operations) == ("deepbench-train", "cuda", tuple(Operation))
    assert {layer.batch_size for layer in table.layers} == {256}
    assert (sum(layer.count for layer in table.layers), len(table.layers)) == (40, 29)  # rows, and geometries
    assert (choices.limits, choices.budgets, choices.time_limit_s) == ((8 << 20,), (1 << 30,), 90.0)
    assert (choices.dtypes, choices.policies) == (("bfloat16", "float32"), (BatchSizePolicy.ALL,))


def test_deepbench_for_inference_is_measured_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(module, "benchmark_convolutions", lambda _, config, *__, **___: seen.append(config.operations))
    for more in ((), ("--operations", "forward,backward-data")):
        assert invoke("bench", "convolutions", "deepbench-inference-device", *more).exit_code == 0
    assert seen == [(Operation.FORWARD,), (Operation.FORWARD, Operation.BACKWARD_DATA)]


def test_nothing_measured_says_why(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where rows have no time: PyTorch is out of memory, or within no limit."""
    result = invoke("bench", "convolutions", layers, *SMALL, "--run-time-limit", "1us")
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "nothing was measured: the 1 us would not have sufficed"
