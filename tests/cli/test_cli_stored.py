"""``mucudnn tune --stored``: answers from stored measurements; and the curve of time by memory."""

from __future__ import annotations

import json
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
    written = ("--database", path / "full.sqlite", "--json", path / "tune.json")
    tuned = invoke("tune", path / "layers.csv", *TUNE, *written)
    assert tuned.exit_code == 0, tuned.output
    exported = invoke("database", "export", path / "profile.jsonl", "--database", path / "full.sqlite")
    assert exported.exit_code == 0
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [{name: row[name] for name in CHOSEN} for row in json.loads(path.read_text())["problems"]]


@pytest.mark.parametrize("name", ["full.sqlite", "profile.jsonl"])
def test_the_answer_is_that_of_the_tuning(folder: Path, tmp_path: Path, name: str) -> None:
    layers, out = folder / "layers.csv", tmp_path / "out.json"
    result = invoke("tune", layers, "--stored", "--database", folder / name, *SIZES, "--json", out)
    assert result.exit_code == 0, result.output
    assert rows(out) == rows(folder / "tune.json")
    assert "workspace limit 64 MiB" in result.stdout


def solved(folder: Path, *options: object) -> tuple[object, ...]:
    return ("tune", folder / "layers.csv", "--stored", "--database", folder / "full.sqlite", *options)


@pytest.mark.parametrize("batch", ["64", "6"])
def test_a_batch_that_was_never_measured_undivided_has_no_time_of_torch(
    folder: Path, tmp_path: Path, batch: str
) -> None:
    result = invoke(*solved(folder, "--batch", batch, "--json", tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert {row["torch_s"] for row in json.loads((tmp_path / "out.json").read_text())["problems"]} == {None}


def test_nothing_is_measured_nor_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.running.devices.current_environment", None)
    monkeypatch.setattr("mucudnn.measuring.clocks.WallClock.now", None)
    before = (folder / "full.sqlite").read_bytes()
    result = invoke(*solved(folder, *SIZES))
    assert result.exit_code == 0, result.output
    assert (folder / "full.sqlite").read_bytes() == before


def test_a_budget_is_divided_and_the_default_limit_does_not_count(folder: Path, tmp_path: Path) -> None:
    given = solved(folder, *SIZES)
    result = invoke(*given, "--workspace-budget", "64KiB", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "workspace budget 64 KiB" in result.stdout
    record = json.loads((tmp_path / "out.json").read_text())
    assert sum(row["workspace_bytes"] for row in record["problems"]) == record["total"]["workspace_bytes"] <= 64 * 1024
    assert "smallest feasible budget" in fail(*given, "--workspace-budget", "1B")
    for name in ("program.lp", "program.mps"):
        invoke(*given, "--workspace-budget", "64KiB", "--write-lp", tmp_path / name)
        assert "winograd" in (tmp_path / name).read_text() or "native" in (tmp_path / name).read_text()
    assert "give --workspace-budget, too" in fail(*given, "--write-lp", tmp_path / "other.lp")


@pytest.mark.parametrize("command", [("tune",)])
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


@pytest.mark.parametrize("bound", ["--workspace-limit", "--workspace-budget"])
def test_the_curve_falls_and_has_what_was_given(folder: Path, tmp_path: Path, bound: str) -> None:
    result = invoke(*solved(folder, *SIZES, bound, "64KiB", "--curve", "--json", tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert f"Least time by workspace {bound.removeprefix('--workspace-')}" in result.stdout
    curve = json.loads((tmp_path / "out.json").read_text())["curve"]
    sizes, times = [point["size_bytes"] for point in curve], [point["time_s"] for point in curve]
    assert 64 * 1024 in sizes
    assert sizes == sorted(sizes)
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--stored", "--database", "missing.sqlite"), "missing.sqlite cannot be read: No such file"),
        (("--stored", "--database", "layers.csv"), "layers.csv is neither a database nor a profile"),
        (("--stored", "--batch", "3", "--policy", "undivided"), "lack 6 of the 6"),
        (("--stored", "--dtype", "float64"), "lack 6 of the 6 convolutions asked for; measure them by mucudnn tune"),
        (("--stored", "--algorithms", "gem"), "algorithms has gem; measured are "),
        (("--stored", "--environment", "Cray"), "environment is 'Cray', which picks none or several; pick one"),
        (("--stored", "--workspace-limit", "0B"), "Raise the workspace limit to"),
        (("--environment", "1"), "--environment picks from stored measurements: give --stored, too"),
        (("--curve", "--workspace-limit", "headroom"), "--curve is of one budget or limit"),
    ],
)
def test_what_cannot_be_chosen_says_so(
    folder: Path, arguments: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MUCUDNN_DATABASE", str(folder / "full.sqlite"))
    assert expected in fail("tune", "layers.csv", *SIZES, *arguments)
