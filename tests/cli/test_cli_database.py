"""``mucudnn database`` at its edges: what it reads back, what it never makes, and what it says of bad rows."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import Result
from support.clock.shared_machine import SharedProcessors
from support.command_line import TUNE, fail, invoke, one_layer
from support.database_rows import FAST, FULL, HERE, PROBLEM, change, fill, rows_of

from mucudnn.database.database import Database
from mucudnn.measuring import whole_runs
from mucudnn.measuring.thorough_race import ThoroughRace
from mucudnn.words.results import Failure, MicroConfig


@pytest.fixture
def full(database: Path) -> Path:
    """The default database, with three rows."""
    return fill(database)


@pytest.fixture(params=["csv", "jsonl"])
def exported(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An export of another database with the same rows."""
    path = tmp_path / f"rows.{request.param}"
    assert invoke("database", "export", path, "--database", fill(tmp_path / "other.sqlite")).exit_code == 0
    return path


def succeed(*arguments: object) -> Result:
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_an_export_is_merged(exported: Path, database: Path) -> None:
    before = exported.read_bytes()
    assert succeed("database", "merge", exported).output == f"{exported}: 3 rows added, 0 were there\n"
    assert succeed("database", "merge", exported).output == f"{exported}: 0 rows added, 3 were there\n"
    assert rows_of(database, HERE, PROBLEM) == FULL
    assert exported.read_bytes() == before


def test_an_export_with_a_bad_row_is_refused_as_a_whole(tmp_path: Path, full: Path) -> None:
    path = tmp_path / "rows.jsonl"
    succeed("database", "export", path, "--database", fill(tmp_path / "other.sqlite"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["threads"] = -2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Database(full) as opened:
        opened.prune(failures=True)
    before = rows_of(full, HERE, PROBLEM)
    message = fail("database", "merge", tmp_path / "other.sqlite", path)
    assert f"profile {path}, line 2: threads must be a whole number, at least 1; fix that" in message
    assert rows_of(full, HERE, PROBLEM) == before, "nothing of the other one was added, either"


@pytest.mark.parametrize("other", ["missing.sqlite", "diary.txt"])
def test_what_cannot_be_merged_makes_no_database(tmp_path: Path, database: Path, other: str) -> None:
    (tmp_path / "diary.txt").write_text("my diary")
    assert other in fail("database", "merge", tmp_path / other)
    assert not database.exists()


@pytest.mark.parametrize("command", [("info",), ("export", "rows.csv"), ("prune",), ("prune", "--dry-run")])
@pytest.mark.parametrize("name", ["mistyped.sqlite", "folder/mistyped.sqlite"])
def test_a_mistyped_name_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    message = fail("database", *command, "--database", name)
    assert f"database {name} does not exist; name another file with --database or MUCUDNN_DATABASE" in message
    assert [*tmp_path.iterdir()] == []


def test_failures_are_pruned_on_demand(full: Path) -> None:
    with Database(full) as opened:
        opened.add_failure(HERE, PROBLEM, 1, Failure(MicroConfig("gemm", 2), "too large"))
    assert succeed("database", "prune").output == "0 rows removed\n"
    assert succeed("database", "prune", "--failures", "--dry-run").output == "2 rows would be removed\n"
    assert succeed("database", "prune", "--failures").output == "2 rows removed\n"
    assert rows_of(full, HERE, PROBLEM) == ((FAST,), (), FULL[2])


@pytest.fixture
def layers(tmp_path: Path) -> Path:
    return one_layer(tmp_path)


def tuned_without_noise(layers: Path, database: Path) -> None:
    succeed("tune", layers, *TUNE, "--batch", "2", "--operations", "forward")
    for table in ("measurements", "verifications"):
        change(database, f"UPDATE {table} SET noise = 0.0")


def test_what_was_measured_under_load_is_refreshed(layers: Path, database: Path) -> None:
    tuned_without_noise(layers, database)
    assert succeed("database", "refresh", "--threads", "1").stdout.startswith("nothing is doubtful on ")
    change(database, "UPDATE measurements SET load = 0.5")
    change(database, "UPDATE verifications SET load = 0.5")
    connection = sqlite3.connect(database)
    count = "SELECT (SELECT count(*) FROM measurements) + (SELECT count(*) FROM verifications)"
    ((before,),) = connection.execute(count)
    told = succeed("database", "refresh", "--threads", "1").stdout
    assert f" of {before} measured again: " in told
    assert "Whole runs again" in told
    ((after,),) = connection.execute(count)
    connection.close()
    assert after > before


def test_all_is_refreshed_on_demand(layers: Path, database: Path) -> None:
    tuned_without_noise(layers, database)
    assert "nothing is doubtful" in succeed("database", "refresh", "--older-than", "1", "--threads", "1").stdout
    assert "measured again" in succeed("database", "refresh", "--all", "--threads", "1").stdout
    assert "measured again" in succeed("database", "refresh", "--older-than", "0", "--threads", "1").stdout
    assert "--older-than" in fail("database", "refresh", "--older-than", "-1")


def test_a_refresh_on_a_busy_machine_says_so(layers: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    succeed("tune", layers, *TUNE, "--batch", "1", "--operations", "forward")
    change(database, "UPDATE measurements SET load = 0.5")
    processors = SharedProcessors(others=1.0)
    monkeypatch.setattr(whole_runs, "watch_of", lambda device: processors.watch())
    message = fail("database", "refresh", "--threads", "1")
    assert "the machine is busy: others take 100% of a core; end other processes, and refresh again" in message


def test_an_interrupted_refresh_says_what_is_left(
    layers: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    succeed("tune", layers, *TUNE, "--batch", "1", "--operations", "forward")
    change(database, "UPDATE measurements SET load = 0.5")

    def interrupt(race: ThoroughRace) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ThoroughRace, "measure", interrupt)
    result = invoke("database", "refresh", "--threads", "1")
    assert result.exit_code == 130
    assert "are left as they were. All measurements are kept" in result.stderr


# Samples


def test_samples_of_a_tuning_are_shown_and_written(layers: Path, database: Path, tmp_path: Path) -> None:
    succeed("tune", layers, *TUNE, "--batch", "2")
    files = ("--csv", tmp_path / "samples.csv", "--json", tmp_path / "samples.json")
    shown = succeed("database", "samples", "4x8x8", "--operations", "forward", "--algorithms", "native", *files).stdout
    assert "forward 4x8x8 -> 4, 3x3" in shown
    assert "backward" not in shown
    assert "gemm" not in shown
    series = json.loads((tmp_path / "samples.json").read_text())["series"]
    assert {(one["operation"], one["algorithm"]) for one in series if one["kind"] == "measurement"} == {
        ("forward", "native")
    }
    count = sum(len(one["samples_s"]) for one in series)
    assert f"{count} samples of " in shown
    assert len((tmp_path / "samples.csv").read_text().splitlines()) == 1 + count


def test_superseded_samples_are_shown_on_demand(full: Path) -> None:
    with Database(full) as opened:
        opened.add(HERE, PROBLEM, 1, FAST)
    assert "12 samples of 2 measurements and whole runs" in succeed("database", "samples").stdout
    assert "18 samples of 3 measurements and whole runs" in succeed("database", "samples", "--all").stdout


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("9x9x9",), "no stored row matches; ask for less, or see mucudnn database info"),
        (("--algorithms", "fft"), "no stored row matches"),
        (("--operations", "sideways"), "one of operations is 'sideways'"),
        (("--environment", "abacus"), f"environment is 'abacus', which is none of those stored: 1: {HERE}"),
        (("--environment", "2"), f"environment is '2', which is none of those stored: 1: {HERE}"),
    ],
)
@pytest.mark.usefixtures("full")
def test_samples_that_are_not_there(asked: tuple[str, ...], expected: str) -> None:
    assert expected in fail("database", "samples", *asked)
