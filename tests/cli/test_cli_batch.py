"""``mucudnn batch`` through its real entry point."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from support.command_line import HEADING, fail, invoke
from support.problems.made_up_sweeps import layer, measured_ms, tuning

from mucudnn.bench.sources import table_tuning

QUICK = ("--algorithms", "gemm", "--time-limit", "50ms", "--threads", "1", "--operations", "forward")


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    """With a batch size of its own, which the sweep does not use."""
    path = tmp_path / "layers.csv"
    path.write_text(f"n,{HEADING}7,only,4,8,8,4,3,3,1,1,1,1\n")
    return path


def test_it_prints_writes_and_draws(layers: Path, tmp_path: Path) -> None:
    files = ("--csv", tmp_path / "out.csv", "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png")
    result = invoke("batch", layers, "--up-to", "3", *QUICK, *files)
    assert result.exit_code == 0, result.output
    for expected in (
        "only forward, per sample",
        "PyTorch / divided",
        "cliffs",
        "measured",
        "solved",
        "whole runs at 3",
    ):
        assert expected in result.output
    with (tmp_path / "out.csv").open(encoding="utf-8") as stream:
        lines = [line for line in csv.DictReader(stream) if line["layer"] == "only" and line["curve"] == "torch"]
    assert [line["batch_size"] for line in lines] == ["1", "2", "3"]
    record = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [point["batch_size"] for point in record["problems"][0]["divided"]] == [1, 2, 3]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_all_prints_every_problem_at_every_size(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [layer([measured_ms("native", n, n) for n in (1, 2, 4)], 4, name=name) for name in ("one", "other")]
    monkeypatch.setattr(table_tuning, "tune_table", lambda *_, **__: tuning(*known))
    shorter, longer = invoke("batch", layers, "--up-to", "4"), invoke("batch", layers, "--up-to", "4", "--all")
    assert "native 2 + native 1" not in shorter.output
    assert longer.output.count("native 2 + native 1") == 2
    for name in ("all convolutions", "one forward", "other forward"):
        assert f"{name}, per sample" in longer.output


def test_cliffs_of_one_kind_share_a_line_unless_all_are_asked_for(
    layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = layer([measured_ms("native", n, n if n < 4 else 2 * n) for n in (1, 2, 4, 8)], 8)
    monkeypatch.setattr(table_tuning, "tune_table", lambda *_, **__: tuning(known))
    shorter, longer = invoke("batch", layers, "--up-to", "8"), invoke("batch", layers, "--up-to", "8", "--all")
    assert shorter.output.count("8, also 4") == shorter.output.count("8 runs as native 2×4, 2.00×") == 1
    assert "4 runs as" not in shorter.output
    assert longer.output.count("4 runs as native 2×2, 2.00×") == 1


def test_ctrl_c_says_that_nothing_is_lost(layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = tuning(layer([measured_ms("native", 4, 1)], 4), wanted=3)
    monkeypatch.setattr(table_tuning, "tune_table", lambda *_, **__: partial)
    result = invoke("batch", layers, "--up-to", "4", "--csv", tmp_path / "out.csv")
    assert result.exit_code == 130
    assert "1 of 3 are ready. All measurements are kept; run the same command again" in result.stderr
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--up-to", "1"], "1 is not in the range x>=2"),
        (["--up-to", "many"], "'many' is not a valid integer"),
        (["--policy", "undivided"], "measures one batch size only"),
        (["--plot", "out.svg"], "'out.svg' is not a PNG file; name one that ends in .png"),
        (["--plot", "no/such/folder/out.png"], "the folder no/such/folder does not exist"),
        (["--batch", "4"], "No such option '--batch'"),
    ],
)
def test_bad_values(arguments: list[str], expected: str, layers: Path, database: Path) -> None:
    assert expected in fail("batch", layers, *arguments)
    assert not database.exists()


@pytest.mark.parametrize("command", ["batch alexnet", "explain alexnet --headroom", "explain alexnet --budget 1MiB"])
def test_matplotlib_is_asked_for_before_anything_is_measured(
    command: str, tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'mucudnn[report]'" in fail(*command.split(), "--plot", tmp_path / "out.png")
    assert not database.exists()
