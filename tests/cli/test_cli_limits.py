"""``mucudnn bench limits`` and ``mucudnn bench network --device``, through their real entry point."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import HEADING, fail, invoke

from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.suites.limits import benchmark as limits_benchmark
from mucudnn.bench.suites.limits.result import LimitsComparison
from mucudnn.bench.suites.network import benchmark as network_benchmark
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
    for expected in ("2 of 2 problems", "1 MiB", "no limit", "rival / ours"):
        assert expected in result.output
    record = json.loads((tmp_path / "out.json").read_text())
    assert [row["limit_bytes"] for row in record["limits"]] == [1024, 2**20, None]
    assert (record["done"], record["reference"], record["source"]) == (2, "torch", str(layers))
    assert record["config"]["workspace_limit"] is None
    with (tmp_path / "out.csv").open(newline="") as stream:
        assert [row["layer"] for row in csv.DictReader(stream)] == ["one"] * 3 + ["three"] * 3
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["out.csv", "out.json"]


def test_what_the_folder_has_is_not_measured_again(layers: Path, tmp_path: Path) -> None:
    asked = ("bench", "limits", layers, *SMALL, "--limits", "1KiB,1MiB", "--operations", "forward")
    first = invoke(*asked, "--out", tmp_path / "folder")
    assert first.exit_code == 0, first.output
    folder = read_folder(tmp_path / "folder")
    assert folder.problems == ()
    assert folder.header.limits["float32"].are_known
    keys = [(row["layer"], row["contestant"], row["limit_bytes"]) for row in folder.lines]
    assert keys == [
        (layer, *contestant)
        for layer in ("one", "three")
        for contestant in (
            ("torch", None),
            *((name, limit) for limit in (1024, 2**20, None) for name in ("undivided", "mucudnn")),
        )
    ]
    assert all(bool(row["samples_s"]) != bool(row["failure"]) for row in folder.lines)
    again = invoke(*asked, "--out", tmp_path / "folder")
    assert "has it all, and nothing was measured: mucudnn report" in again.output
    assert read_folder(tmp_path / "folder").lines == folder.lines
    assert "three" in invoke("report", tmp_path / "folder", "--markdown").output


def test_the_defaults_are_those_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def nothing(table: object, config: object, limits: object, **rest: object) -> Iterator[LimitsComparison]:
        seen.update(table=table, config=config, limits=limits, **rest)
        return iter(())

    monkeypatch.setattr(limits_benchmark, "compare_under_limits", nothing)
    assert invoke("bench", "limits", "--seconds", "90", "--device", "cuda").exit_code == 0
    assert seen["table"].source == "deepbench-train"
    layers = seen["table"].layers
    assert {(layer.problem.r, layer.problem.s) for layer in layers} == {(3, 3), (5, 5)}
    assert {layer.batch_size for layer in layers} == {256}
    assert (sum(layer.count for layer in layers), len(layers)) == (40, 29)  # rows, and geometries
    assert seen["limits"] == tuple(size << 20 for size in (8, 64, 128, 256, 512))
    assert seen["config"].operations == tuple(Operation)
    assert (seen["device"], seen["seconds"]) == ("cuda", 90.0)


def test_all_filters(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(limits_benchmark, "compare_under_limits", lambda table, *_, **__: seen.append(table) or [])
    invoke("bench", "limits", layers, "--filters", "all")
    assert [layer.name for layer in seen[0].layers] == ["one", "two", "three"]


def test_what_is_ready_is_there_after_an_interruption(
    layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = limits_benchmark.compare_under_limits

    def interrupted(*args: Any, **kwargs: Any) -> Iterator[LimitsComparison]:
        yield next(compare(*args, **kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(limits_benchmark, "compare_under_limits", interrupted)
    files = ("--csv", tmp_path / "out.csv", "--json", tmp_path / "out.json")
    result = invoke("bench", "limits", layers, *SMALL, "--operations", "forward", *files)
    assert result.exit_code == 130
    assert "1 of 2 problems" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["complete"] is False
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + 6


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--filters", "3x3,5", "'5' is not height x width of a filter; write for example 3x3,5x5, or all"),
        ("--filters", "7x7", "has no layer with a filter of 7x7; it has 1x1, 3x3, 5x5"),
        ("--limits", "8MiB,none", "no limit at all is compared in any case"),
        ("--limits", "8", "size '8' has no unit"),
        ("--device", "tpu", "mucudnn measures on 'cpu' and 'cuda'"),
        ("--algorithms", "magic", "algorithms has magic; this machine has"),
    ],
)
def test_bad_values_say_what_is_allowed(layers: Path, option: str, value: str, message: str) -> None:
    assert message in fail("bench", "limits", layers, "--batch", "2", option, value)


def test_bench_network_hands_on_the_device(layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def stop(*args: object, **rest: object) -> None:
        seen.update(rest)
        raise KeyboardInterrupt

    monkeypatch.setattr(network_benchmark, "benchmark_network", stop)
    invoke("bench", "network", layers, "--device", "cuda")
    assert seen["device"] == "cuda"
    monkeypatch.undo()
    assert "mucudnn measures on 'cpu' and 'cuda'" in fail("bench", "network", layers, "--device", "tpu")
