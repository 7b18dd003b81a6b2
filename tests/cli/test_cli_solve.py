"""``mucudnn solve`` and ``mucudnn batch``: answers from stored measurements, and sweeps over batch sizes."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command_line import HEADING, TUNE, fail, invoke
from support.problems.made_up_sweeps import layer, measured_ms, tuning

from mucudnn.bench.sources import table_tuning
from mucudnn.bench.suites.convolutions import benchmark

LAYERS = HEADING + "one,4,8,8,4,3,3,1,1,1,1\ntwo,4,8,8,8,1,1,0,0,1,1\n"
SIZES = ("--batch", "2")
CHOSEN = ("layer", "operation", "count", "configuration", "torch_s", "mucudnn_s", "workspace_bytes", "relative_error")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``layers.csv``, and what was measured of them."""
    path = tmp_path_factory.mktemp("solve")
    (path / "layers.csv").write_text(LAYERS)
    tuned = invoke(
        "tune",
        path / "layers.csv",
        *TUNE,
        "--thorough",
        "--database",
        path / "full.sqlite",
        "--json",
        path / "tune.json",
    )
    assert tuned.exit_code == 0, tuned.output
    for name in ("profile.csv", "profile.jsonl"):
        assert invoke("database", "export", path / name, "--database", path / "full.sqlite").exit_code == 0
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in CHOSEN} for row in json.loads(path.read_text())["problems"]]


@pytest.mark.parametrize("name", ["full.sqlite", "profile.csv", "profile.jsonl"])
def test_the_answer_is_that_of_the_tuning(folder: Path, tmp_path: Path, name: str) -> None:
    layers, out = folder / "layers.csv", tmp_path / "solve.json"
    result = invoke("solve", folder / name, "--network", layers, *SIZES, "--json", out)
    assert result.exit_code == 0, result.output
    assert rows(out) == rows(folder / "tune.json")
    record = json.loads(out.read_text())
    assert (record["complete"], record["notes"]) == (True, [])
    assert "workspace limit 64 MiB" in result.stdout
    assert "measured on" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(("batch", "sizes"), [("64", "1, 2"), ("3", "1, 2")])
def test_a_batch_that_was_never_measured_undivided_has_a_note(
    folder: Path, tmp_path: Path, batch: str, sizes: str
) -> None:
    given = (folder / "full.sqlite", "--network", folder / "layers.csv", "--batch", batch)
    result = invoke("solve", *given, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    expected = f"measured in micro-batches of {sizes} only, PyTorch's own undivided not among them"
    assert f"Note: 6 of 6 convolutions, batch {batch}: {expected}" in result.stderr
    record = json.loads((tmp_path / "out.json").read_text())
    assert expected in record["notes"][0]
    assert {row["torch_s"] for row in record["problems"]} == {None}


def test_nothing_is_measured_nor_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.running.environment.current_environment", None)
    monkeypatch.setattr("mucudnn.measuring.timing.timer.WallClock.now", None)
    before = (folder / "full.sqlite").read_bytes()
    result = invoke("solve", folder / "full.sqlite", "--network", folder / "layers.csv", *SIZES)
    assert result.exit_code == 0, result.output
    assert (folder / "full.sqlite").read_bytes() == before


def test_a_budget_is_divided_and_the_default_limit_does_not_count(folder: Path, tmp_path: Path) -> None:
    given = (folder / "full.sqlite", "--network", folder / "layers.csv", *SIZES)
    result = invoke("solve", *given, "--workspace-budget", "64KiB", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "workspace budget 64 KiB" in result.stdout
    record = json.loads((tmp_path / "out.json").read_text())
    assert sum(row["workspace_bytes"] for row in record["problems"]) == record["total"]["workspace_bytes"] <= 64 * 1024
    assert "smallest feasible budget" in fail("solve", *given, "--workspace-budget", "1B")
    for name in ("program.lp", "program.mps"):
        invoke("solve", *given, "--workspace-budget", "64KiB", "--write-lp", tmp_path / name)
        assert "winograd" in (tmp_path / name).read_text() or "native" in (tmp_path / name).read_text()
    assert "give --workspace-budget, too" in fail("solve", *given, "--write-lp", tmp_path / "other.lp")


@pytest.mark.parametrize("command", [("solve", "no.sqlite", "--network"), ("tune",), ("bench", "network")])
@pytest.mark.parametrize("limit", ["64MiB", "none"])
def test_limit_and_budget_are_not_given_together(command: tuple[str, ...], limit: str) -> None:
    message = fail(*command, "alexnet", "--workspace-budget", "1GiB", "--workspace-limit", limit)
    assert "--workspace-limit and --workspace-budget exclude each other" in message


@pytest.mark.parametrize("command", [("tune",), ("bench", "network")])
def test_other_commands_hand_on_the_budget(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def stop(table: object, config: object, **_: object) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(table_tuning, "tune_table", stop)
    monkeypatch.setattr(benchmark, "table_tasks", stop)
    invoke(*command, "alexnet", "--workspace-budget", "1MiB")
    assert seen[0].workspace_budget_bytes == 2**20
    assert seen[0].workspace_limit_bytes is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("missing.sqlite", "--network", "layers.csv"), "missing.sqlite cannot be read: No such file"),
        (("layers.csv", "--network", "layers.csv"), "layers.csv is neither a database nor a profile"),
        (("full.sqlite", "--network", "alexnte"), "'alexnte'; did you mean alexnet?"),
        (("full.sqlite",), "Missing option '--network'"),
        (("full.sqlite", "--network", "layers.csv", "--batch", "3", "--policy", "undivided"), "lack 6 of the 6"),
        (
            ("full.sqlite", "--network", "layers.csv", "--dtype", "float64"),
            "not measured, but it is with dtype float32",
        ),
        (
            ("full.sqlite", "--network", "layers.csv", "--algorithms", "gem"),
            "algorithms has gem; measured are gemm, nat",
        ),
        (("full.sqlite", "--network", "layers.csv", "--environment", "Cray"), "'Cray', which is none of those stored"),
        (("full.sqlite", "--network", "layers.csv", "--workspace-limit", "0B"), "Raise the workspace limit to"),
    ],
)
def test_what_cannot_be_solved_says_so(
    folder: Path, arguments: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert expected in fail("solve", *arguments)


# ``mucudnn batch`` through its real entry point.


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
