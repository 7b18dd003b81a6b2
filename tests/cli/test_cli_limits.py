"""``mucudnn bench limits`` and ``mucudnn bench network``, through their real entry point."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import HEADING, fail, invoke

from mucudnn.bench.folders.reading import read_folder, read_result_file
from mucudnn.bench.suites.convolutions import benchmark as module
from mucudnn.bench.suites.convolutions.contest import Contests
from mucudnn.words.problem import Operation

SMALL = ("--batch", "2", "--algorithms", "gemm", "--time-limit", "50ms", "--threads", "1", "--rounds", "1")


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    path = tmp_path / "layers.csv"
    path.write_text(HEADING + "one,4,8,8,4,3,3,1,1,1,1\ntwo,4,8,8,4,1,1,0,0,1,1\nthree,4,8,8,4,5,5,2,2,1,1\n")
    return path


def test_the_comparison_is_printed_and_written(layers: Path, tmp_path: Path) -> None:
    files = ("--csv", tmp_path / "out.csv", "--json", tmp_path / "out.json")
    result = invoke("bench", "limits", layers, *SMALL, "--limits", "1KiB,1MiB", "--operations", "forward", *files)
    assert result.exit_code == 0, result.output
    for expected in ("1 MiB", "no limit", "undivided / ours", "workspace for the time of torch"):
        assert expected in result.output
    folder = read_result_file(tmp_path / "out.json")
    assert (folder.header.benchmark, folder.header.source, folder.problems) == ("limits", str(layers), ())
    assert folder.header.settings["workspace_limit"] == [1024, 2**20, None]
    keys = [(row["layer"], row["contestant"], row["limit_bytes"]) for row in folder.lines]
    assert sorted(keys, key=str) == sorted(
        [
            (layer, *contestant)
            for layer in ("one", "three")
            for contestant in (
                ("torch", None),
                *((name, limit) for limit in (1024, 2**20, None) for name in ("undivided", "mucudnn")),
            )
        ],
        key=str,
    )
    assert all(bool(row["samples_s"]) != bool(row["failure"]) for row in folder.lines)
    with (tmp_path / "out.csv").open(newline="") as stream:
        assert [row["layer"] for row in csv.DictReader(stream)] == [row["layer"] for row in folder.lines]
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out.csv", "out.json"]


def test_what_the_folder_has_is_not_measured_again(layers: Path, tmp_path: Path) -> None:
    asked = ("bench", "network", layers, *SMALL, "--out", tmp_path / "folder")
    first = invoke(*asked)
    assert first.exit_code == 0, first.output
    folder = read_folder(tmp_path / "folder")
    assert folder.problems == ()
    assert folder.header.limits["float32"].are_known
    assert {row["operation"] for row in folder.lines} == {*Operation}
    assert invoke(*asked).exit_code == 0  # the machine's limits are measured again, and the better ones stay
    assert read_folder(tmp_path / "folder").lines == folder.lines
    assert "three" in invoke("report", tmp_path / "folder").output


def test_the_defaults_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(module, "benchmark_convolutions", lambda *args, **rest: seen.append((args, rest)))
    assert invoke("bench", "limits", "--run-time-limit", "90s", "--device", "cuda").exit_code == 0
    ((name, table, config, choices, _), rest) = seen[0]
    assert (name, table.source, rest["device"]) == ("limits", "deepbench-train", "cuda")
    assert {(layer.problem.r, layer.problem.s) for layer in table.layers} == {(3, 3), (5, 5)}
    assert {layer.batch_size for layer in table.layers} == {256}
    assert (sum(layer.count for layer in table.layers), len(table.layers)) == (40, 29)  # rows, and geometries
    assert choices.limits == (*(size << 20 for size in (8, 64, 128, 256, 512)), None)
    assert (choices.time_limit_s, config.operations, config.thorough) == (90.0, tuple(Operation), True)


def test_all_filters(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(module, "benchmark_convolutions", lambda name, table, *_, **__: seen.append(table))
    invoke("bench", "limits", layers, "--filters", "all")
    assert [layer.name for layer in seen[0].layers] == ["one", "two", "three"]


def test_what_is_ready_is_there_after_an_interruption(
    layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Contests.rows

    def interrupted(self: Contests, layer: Any, *rest: Any) -> Any:
        if layer.name != "one":
            raise KeyboardInterrupt
        return rows(self, layer, *rest)

    monkeypatch.setattr(Contests, "rows", interrupted)
    files = ("--csv", tmp_path / "out.csv", "--json", tmp_path / "out.json")
    result = invoke("bench", "limits", layers, *SMALL, "--operations", "forward", "--limits", "1MiB", *files)
    assert result.exit_code == 130
    assert "left out: 1 problem, as the run was stopped before: three" in result.output
    assert len(json.loads((tmp_path / "out.json").read_text())["rows"]) == 5
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + 5


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--filters", "3x3,5", "'5' is not height x width of a filter; write for example 3x3,5x5, or all"),
        ("--filters", "7x7", "has no layer with a filter of 7x7; it has 1x1, 3x3, 5x5"),
        ("--limits", "8", "size '8' has no unit"),
        ("--device", "tpu", "mucudnn measures on 'cpu' and 'cuda'"),
        ("--algorithms", "magic", "algorithms has magic; this machine has"),
    ],
)
def test_bad_values_say_what_is_allowed(layers: Path, option: str, value: str, message: str) -> None:
    assert message in fail("bench", "limits", layers, "--batch", "2", option, value)
