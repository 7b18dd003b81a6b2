"""Workspace division and its curves: against brute force and dynamic programming; programs that are missing or late."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import pulp
import pytest

import mucudnn.solver.knapsack as knapsack
from mucudnn.core.answers import Status
from mucudnn.core.errors import InfeasibleError
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.solver.division import Division, DivisionProblem, budget_curve, limit_curve, solve_wd

Options = dict[str, list[Configuration]]


def configuration(name: str, time_s: float, workspace_bytes: int, micro_batches: int = 1) -> Configuration:
    return Configuration((MicroConfig(name, 8 // micro_batches),) * micro_batches, time_s, workspace_bytes)


def least_bytes(options: Options) -> int:
    return sum(min(c.workspace_bytes for c in row) for row in options.values())


def correlated(problems: int = 12, seed: int = 7) -> Options:
    """Many sums, close to each other, of which the bounds rule out few."""
    source = random.Random(seed)
    rows = [[source.randint(100, 900) for _ in range(4)] for _ in range(problems)]
    return {
        f"p{i}": [configuration(f"a{b}", (1000 - b + source.random()) * 1e-3, b) for b in row]
        for i, row in enumerate(rows)
    }


def hard_division() -> Division[str]:
    options = correlated()
    return solve_wd(options, least_bytes(options) + 1701)


def random_options(source: random.Random, problems: int, most: int, largest: int = 9) -> Options:
    """Small whole numbers, so that ties are frequent; some options are dominated."""
    return {
        f"p{i}": [
            configuration(f"a{j}", source.randint(0, largest) * 1e-3, source.randint(0, largest), source.choice([1, 2]))
            for j in range(source.randint(1, most))
        ]
        for i in range(problems)
    }


def _order(chosen: Sequence[Configuration], counts: Sequence[int]) -> tuple[object, ...]:
    """The best by definition: time, workspace, micro-batches, names. Times are whole milliseconds here."""
    return (
        sum(round(c.time_s * 1e3) * count for c, count in zip(chosen, counts, strict=True)),
        sum(c.workspace_bytes for c in chosen),
        sum(len(c.micro_configs) for c in chosen),
        [str(c) for c in chosen],
    )


def test_equal_to_brute_force_ties_included() -> None:
    source = random.Random(1)
    for _ in range(200):
        options = random_options(source, source.randint(1, 5), 4)
        counts = {key: source.randint(1, 3) for key in options}
        budget = least_bytes(options) + source.randint(0, 20)
        fitting = [c for c in product(*options.values()) if sum(o.workspace_bytes for o in c) <= budget]
        expected = min(fitting, key=lambda c: _order(c, list(counts.values())))
        found = solve_wd(options, budget, counts=counts)
        assert tuple(found.assignment.values()) == expected
        assert found.status is Status.OPTIMAL
        assert (
            found.objective_s
            == found.bound_s
            == pytest.approx(sum(c.time_s * counts[k] for k, c in found.assignment.items()))
        )


def test_equal_to_dynamic_programming_over_bytes() -> None:
    source = random.Random(2)
    for _ in range(20):
        options = random_options(source, 15, 8, largest=99)
        budget = least_bytes(options) + source.randint(0, 400)
        table = [0.0] * (budget + 1)  # the least time within each number of bytes
        for row in options.values():
            table = [
                min((table[b - c.workspace_bytes] + c.time_s for c in row if c.workspace_bytes <= b), default=math.inf)
                for b in range(budget + 1)
            ]
        assert solve_wd(options, budget).objective_s == pytest.approx(table[budget], abs=1e-9)


def test_the_budget_is_inclusive_and_the_smallest_feasible_one_is_named() -> None:
    options = random_options(random.Random(3), 8, 5, largest=10**6)
    smallest = least_bytes(options)
    assert solve_wd(options, smallest).workspace_bytes == smallest
    with pytest.raises(InfeasibleError, match=f"smallest feasible budget is {smallest}B") as failure:
        solve_wd(options, smallest - 1)
    assert failure.value.smallest_feasible_bytes == smallest
    most = max(options, key=lambda key: min(c.workspace_bytes for c in options[key]))
    assert f"The largest needs: {most} (at least" in str(failure.value)
    assert "and 3 more" in str(failure.value)


def test_without_a_budget_each_problem_gets_its_fastest() -> None:
    options = random_options(random.Random(4), 20, 6)
    found = solve_wd(options, None)
    for key, chosen in found.assignment.items():
        assert chosen == min(options[key], key=lambda c: _order([c], [1]))
    assert (found.solver, found.notes) == ("bounds alone", ())


def test_another_seed_of_hashes_gives_the_same_answer() -> None:
    """Answers of new processes: sets and dictionaries of text have another order in each."""
    code = """
from mucudnn.core.records import Configuration, Measurement, MicroConfig
from mucudnn.solver.division import budget_curve
from mucudnn.solver.division import DivisionProblem, solve_wd
from mucudnn.solver.reuse import account_wr
names = {f"algorithm {i}" for i in range(12)}
rows = [Measurement(MicroConfig(name, size), 0.0, size * 1e-3, 0, 4, 0.0) for name in names for size in (1, 2, 4)]
options = {name: [Configuration((MicroConfig(other, 4),), 50.0 - len(other), len(other)) for other in names]
           for name in names}
print(account_wr(rows, 7, None).configuration, sorted(solve_wd(options, 137).assignment.items()), budget_curve(options))
"""
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in "012"
    }
    assert len(answers) == 1


def test_the_account_tells_how_it_was_found() -> None:
    found = hard_division()
    told = json.loads(json.dumps(found.to_json()))
    assert told["status"] == "optimal"
    assert told["gap"] == 0
    assert told["options"] == 48 >= told["undominated_options"] >= told["remaining_options"] >= 12
    assert sum(row["workspace_bytes"] for row in told["assignment"]) == told["workspace_bytes"] <= told["budget_bytes"]
    assert sum(row["time_s"] * row["count"] for row in told["assignment"]) == pytest.approx(told["objective_s"])
    assert "12 problems: " in str(found)
    assert "optimal; 48 options" in str(found)


# Workspace division where a program is missing, broken, wrong or late: said, and done without it.


@pytest.fixture
def without_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are asked at once."""
    monkeypatch.setattr(knapsack, "FEW_SUMS", 0)


@pytest.fixture
def without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("without_search")
@pytest.mark.parametrize("name", ["HiGHS", "CBC"])
def test_the_programs_know_the_optimum_without_the_search(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both for real: where there is no room for the search, the answer is the program's."""
    best = hard_division()
    if name == "CBC":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        pytest.importorskip("highspy")
    monkeypatch.setattr(knapsack, "MOST_SUMS", 0)
    found = hard_division()
    assert found.status is Status.FEASIBLE
    assert found.solver.startswith(name)
    assert found.objective_s == pytest.approx(best.objective_s, rel=1e-6)
    assert found.bound_s <= best.objective_s
    assert "more than 0 partial sums" in found.notes[-1]


@pytest.mark.usefixtures("without_search", "without_highs")
def test_a_program_that_is_stopped_by_the_time_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: object, program: pulp.LpProblem, **_: object) -> None:
        program.assignVarsVals({variable.name: 0 for variable in program.variables()})
        program.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", stopped)
    assert hard_division().notes[0] == "CBC was stopped by the time limit"


def test_where_the_time_ends_the_best_so_far_comes_with_its_gap() -> None:
    options = correlated()
    budget = least_bytes(options) + 1701
    best, found = solve_wd(options, budget), solve_wd(options, budget, time_limit_s=0.0)
    assert found.status is Status.FEASIBLE
    assert found.workspace_bytes <= budget
    assert found.bound_s <= best.objective_s <= found.objective_s
    assert 0 < found.gap < 1
    assert found.notes[0].endswith("was not started: time limit reached")
    assert found.notes[1].startswith("the search for a proof was stopped (time limit reached)")
    assert solve_wd(options, budget, time_limit_s=60.0).assignment == best.assignment


def test_other_solvers_read_the_program_from_a_file_and_find_the_same(tmp_path: Path) -> None:
    highspy = pytest.importorskip("highspy")
    source = random.Random(5)
    options = random_options(source, 6, 5, largest=30)
    counts = {key: source.randint(1, 3) for key in options}
    for budget in (least_bytes(options), least_bytes(options) + 25, None):
        expected_ps = 1e12 * solve_wd(options, budget, counts=counts).objective_s
        for suffix in (".lp", ".mps"):
            file = tmp_path / f"program{suffix}"
            file.write_text(DivisionProblem.of(options, counts).program(budget, suffix))
            solver = highspy.Highs()
            solver.setOptionValue("output_flag", False)
            solver.readModel(str(file))
            solver.run()
            assert solver.getInfo().objective_function_value == pytest.approx(expected_ps)
            cbc = [pulp.PULP_CBC_CMD.pulp_cbc_path, file, "solve", "solution", tmp_path / "solution"]
            subprocess.run(list(map(str, cbc)), check=True, capture_output=True)
            first, *chosen = (tmp_path / "solution").read_text().splitlines()
            assert float(first.partition("objective value")[2]) == pytest.approx(expected_ps)
            assert sum(float(line.split()[2]) for line in chosen) == len(options)


MIB = 2**20


# 10 ms in 64 MiB; 8 ms from 128 MiB on; 5 ms from 256 MiB on.
STAIRS = {
    "p": [
        configuration("small", 10e-3, 64 * MIB),
        configuration("middle", 8e-3, 128 * MIB),
        configuration("large", 5e-3, 256 * MIB),
    ]
}


@pytest.mark.parametrize("seed", range(20))
def test_every_point_is_the_exact_division_of_its_budget(seed: int) -> None:
    options = random_options(random.Random(seed), 6, 6, largest=90)
    counts = {key: 1 + i % 3 for i, key in enumerate(options)}
    for point in budget_curve(options, counts):
        assert point.time_s == pytest.approx(solve_wd(options, point.size_bytes, counts=counts).objective_s)


@pytest.mark.parametrize("seed", range(20))
def test_it_goes_from_the_smallest_feasible_budget_to_where_nothing_more_is_bought(seed: int) -> None:
    options = random_options(random.Random(seed), 6, 6, largest=90)
    curve = budget_curve(options)
    first, last = curve[0], curve[-1]
    assert first.size_bytes == least_bytes(options)
    assert last.time_s == pytest.approx(solve_wd(options, None).objective_s)
    if last.size_bytes > first.size_bytes:
        assert solve_wd(options, last.size_bytes - 1).objective_s > last.time_s
    for less, more in pairwise(curve):
        assert less.size_bytes < more.size_bytes
        assert less.time_s > more.time_s


def test_budgets_that_are_asked_for_are_on_it() -> None:
    curve = budget_curve(STAIRS, points=2, budgets=[200 * MIB, 10**12])
    assert [(p.size_bytes, p.time_s) for p in curve] == [
        (64 * MIB, 10e-3),
        (200 * MIB, 8e-3),
        (256 * MIB, 5e-3),
        (10**12, 5e-3),
    ]
    with pytest.raises(InfeasibleError, match=rf"smallest feasible budget is {64 * MIB}B"):
        budget_curve(STAIRS, budgets=[64 * MIB - 1])


@pytest.mark.parametrize("seed", range(20))
def test_every_limit_has_the_sum_of_the_fastest_within_it(seed: int) -> None:
    options = random_options(random.Random(seed), 6, 6, largest=90)
    counts = {key: 1 + i % 3 for i, key in enumerate(options)}
    curve = limit_curve(options, counts, points=1000, limits=[45, 10**6])
    feasible = max(min(c.workspace_bytes for c in each) for each in options.values())
    assert curve[0].size_bytes == feasible
    assert curve[-1].size_bytes == 10**6
    for point in curve:
        fitting = {
            key: [c.time_s for c in each if c.workspace_bytes <= point.size_bytes] for key, each in options.items()
        }
        assert point.time_s == pytest.approx(sum(counts[key] * min(times) for key, times in fitting.items()))
    assert len(limit_curve(options, counts, points=3)) <= 3


def test_a_network_without_problems_takes_no_time() -> None:
    assert [p.time_s for p in budget_curve({})] == [p.time_s for p in limit_curve({}, {})] == [0]
