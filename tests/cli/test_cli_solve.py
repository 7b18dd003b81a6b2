"""``mucudnn solve``: answers from stored measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command_line import HEADING, TUNE, fail, invoke

from mucudnn.bench.sources import table_tuning

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


@pytest.mark.parametrize("command", [("solve", "no.sqlite", "--network"), ("tune",)])
@pytest.mark.parametrize("limit", ["64MiB", "none"])
def test_limit_and_budget_are_not_given_together(command: tuple[str, ...], limit: str) -> None:
    message = fail(*command, "alexnet", "--workspace-budget", "1GiB", "--workspace-limit", limit)
    assert "--workspace-limit and --workspace-budget exclude each other" in message


def test_tune_hands_on_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def stop(table: object, config: object, **_: object) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(table_tuning, "tune_table", stop)
    invoke("tune", "alexnet", "--workspace-budget", "1MiB")
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


@pytest.mark.parametrize("command", ["explain alexnet --headroom", "explain alexnet --budget 1MiB"])
def test_matplotlib_is_asked_for_before_anything_is_measured(
    command: str, tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'mucudnn[report]'" in fail(*command.split(), "--plot", tmp_path / "out.png")
    assert not database.exists()
