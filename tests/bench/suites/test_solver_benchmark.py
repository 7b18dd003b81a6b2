"""The benchmark of the solvers: what it measures, prints and writes; on sizes that take no time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from support.command_line import invoke

from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.suites import solver as solver_benchmark
from mucudnn.bench.suites.solver import budgets, made_up_measurements, made_up_options, time_division, time_front
from mucudnn.solver.division import solve_wd
from mucudnn.solver.front import desirable_sets


def test_the_made_up_fronts_have_setups_prepared_bytes_and_choices() -> None:
    measurements = made_up_measurements(16)
    assert len(measurements) == solver_benchmark.ALGORITHMS * 16
    assert sum(m.setup_s > 0 and m.prepared_bytes > 0 for m in measurements) == (solver_benchmark.ALGORITHMS - 1) * 16
    assert desirable_sets(measurements, 16).size(16) > 5


def test_the_made_up_budgets_matter() -> None:
    options = made_up_options(30, 10, seed=1)
    assert [len(row) for row in options.values()] == [10] * 30
    times = [solve_wd(options, budget).objective_s for budget in (*budgets(options), None)]
    assert times == sorted(set(times), reverse=True)


def test_each_time_is_sampled_in_its_rounds() -> None:
    rounds = solver_benchmark.ROUNDS
    for samples_s, number in ((time_front(8), rounds), (time_division(5, 4), rounds * len(solver_benchmark.BUDGETS))):
        assert len(samples_s) == number
        assert min(samples_s) > 0


@pytest.fixture
def samples(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was timed."""
    timed: list[str] = []

    def times(what: str, *samples_s: float) -> list[float]:
        timed.append(what)
        return [*samples_s]

    wanted = {"front 256": (partial(times, "front", 0.01, 0.012, 0.034), 0.1), "WD": (partial(times, "WD", 0.5), 0.3)}
    monkeypatch.setattr(solver_benchmark, "_WANTED", wanted)
    return timed


@pytest.mark.usefixtures("samples")
def test_the_command_prints_and_writes_the_rows(tmp_path: Path) -> None:
    result = invoke("bench", "solver", "--json", tmp_path / "solver.json")
    assert result.exit_code == 0, result.output
    assert "front 256: 12 ms, slowest 34 ms (bar 100 ms)" in result.output
    record = json.loads((tmp_path / "solver.json").read_text())
    assert [(row["what"], row["samples_s"], row["bar_s"]) for row in record["rows"]] == [
        ("front 256", [0.01, 0.012, 0.034], 0.1),
        ("WD", [0.5], 0.3),
    ]
    assert record["settings"]["program"] in ("HiGHS", "CBC")
    assert record["environment"]["threads"] == 1
    assert record["date"].startswith("20")


def test_the_folder_has_the_samples_and_what_is_there_is_not_timed_again(tmp_path: Path, samples: list[str]) -> None:
    first = invoke("bench", "solver", "--out", tmp_path / "folder")
    again = invoke("bench", "solver", "--out", tmp_path / "folder")
    assert (first.exit_code, again.exit_code) == (0, 0), first.output
    assert first.stdout == again.stdout
    assert samples == ["front", "WD"]
    rows = read_folder(tmp_path / "folder").rows
    assert list(rows["samples_s"]) == [[0.01, 0.012, 0.034], [0.5]]
    shown = invoke("report", tmp_path / "folder", "--markdown").output
    assert "front 256" in shown
    assert "more: bar, ms" in shown
