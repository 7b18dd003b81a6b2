"""The benchmark of the solvers: what it measures, prints and writes; on sizes that take no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command_line import invoke

from mucudnn.bench.suites.solver import benchmark as solver_benchmark
from mucudnn.bench.suites.solver.benchmark import (
    budgets,
    made_up_measurements,
    made_up_options,
    time_division,
    time_front,
)
from mucudnn.bench.suites.solver.result import SolverTime
from mucudnn.solver import desirable_sets, solve_wd


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


def test_each_row_stands_beside_its_bar() -> None:
    for row in (time_front(8, bar_s=0.25), time_division(5, 4, bar_s=0.25)):
        assert 0 < row.median_s <= row.slowest_s
        assert row.bar_s == 0.25


def test_the_command_prints_and_writes_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_benchmark, "time_front", lambda n, bar_s: SolverTime(f"front {n}", 0.012, 0.034, bar_s))
    monkeypatch.setattr(
        solver_benchmark, "time_division", lambda p, c, bar_s: SolverTime(f"WD {p} x {c}", 0.5, 0.7, bar_s)
    )
    result = invoke("bench", "solver", "--json", tmp_path / "solver.json")
    assert result.exit_code == 0, result.output
    assert "front 256: 12 ms, slowest 34 ms (bar 100 ms)" in result.output
    record = json.loads((tmp_path / "solver.json").read_text())
    assert [(row["what"], row["bar_s"]) for row in record["rows"]] == [
        ("front 256", 0.1),
        ("front 1024", 1.0),
        ("WD 159 x 20", 0.3),
        ("WD 480 x 40", 3.0),
    ]
    assert record["program"] in ("HiGHS", "CBC")
    assert record["environment"]["threads"] == 1
    assert record["date"].startswith("20")
