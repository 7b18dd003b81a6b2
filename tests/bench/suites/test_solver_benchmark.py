"""The benchmark of the solvers: what it measures, prints and writes; on sizes that take no time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from support.command_line import invoke

from mucudnn.bench.folders.reading import read_folder
from mucudnn.bench.suites import solver as solver_benchmark
from mucudnn.bench.suites.solver import budgets, made_up_measurements, made_up_options
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


def test_the_command_keeps_what_it_prints_and_times_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[str] = []

    def times(what: str, *samples_s: float) -> list[float]:
        timed.append(what)
        return [*samples_s]

    wanted = {"front 256": (partial(times, "front", 0.01, 0.012, 0.034), 0.1), "WD": (partial(times, "WD", 0.5), 0.3)}
    monkeypatch.setattr(solver_benchmark, "_WANTED", wanted)
    asked = ("bench", "solver", "--json", tmp_path / "solver.json", "--out", tmp_path / "folder")
    first, again = invoke(*asked), invoke(*asked)
    assert (first.exit_code, again.exit_code) == (0, 0), first.output
    assert "front 256: 12 ms, slowest 34 ms (bar 100 ms)" in first.output
    assert first.stdout == again.stdout
    assert timed == ["front", "WD"]
    record = json.loads((tmp_path / "solver.json").read_text())
    expected = [("front 256", [0.01, 0.012, 0.034], 0.1), ("WD", [0.5], 0.3)]
    assert [(row["what"], row["samples_s"], row["bar_s"]) for row in record["rows"]] == expected
    assert record["settings"]["program"] in ("HiGHS", "CBC")
    assert list(read_folder(tmp_path / "folder").rows["samples_s"]) == [samples for _, samples, _ in expected]
