"""Workspace division where a program is missing, broken, wrong or late: said, and done without it."""

from __future__ import annotations

import importlib.util
import math
import subprocess

import pulp
import pytest
from support.problems.solver_cases import correlated, hard_division, least_bytes

import mucudnn.solver.knapsack as knapsack
from mucudnn.solver.account import Status
from mucudnn.solver.division import solve_wd


@pytest.fixture
def without_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are asked at once."""
    monkeypatch.setattr(knapsack, "FEW_SUMS", 0)


@pytest.fixture
def without_highs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_what_the_search_proves_alone_starts_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "_run_program", None)
    assert (hard_division().solver, hard_division().notes) == ("exact search", ())


@pytest.mark.usefixtures("without_search")
def test_highs_runs_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("highspy")
    monkeypatch.setattr(subprocess, "Popen", None)
    found = hard_division()
    assert (found.solver, found.notes) == ("HiGHS, checked by exact search", ())


@pytest.mark.usefixtures("without_search", "without_highs")
def test_cbc_answers_where_there_is_no_highs() -> None:
    found = hard_division()
    assert (found.solver, found.notes) == ("CBC, checked by exact search", ())


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
@pytest.mark.parametrize("program", ["/nowhere/cbc", "/bin/false", "/bin/true"])
def test_a_missing_or_broken_program_is_said_and_done_without(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hard_division()
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", program)
    found = hard_division()
    assert found.assignment == expected.assignment
    assert found.solver == "exact search"
    assert "CBC failed (PulpSolverError: " in found.notes[0]
    assert found.notes[0] in str(found)


@pytest.mark.usefixtures("without_search")
def test_a_broken_highs_is_said_and_cbc_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise RuntimeError("out of luck")

    pytest.importorskip("highspy")
    expected = hard_division()
    monkeypatch.setattr(pulp.HiGHS, "callSolver", crash)
    found = hard_division()
    assert found.assignment == expected.assignment
    assert found.solver == "CBC, checked by exact search"
    assert found.notes == ("HiGHS failed (RuntimeError: out of luck); solved without it",)


@pytest.mark.usefixtures("without_search", "without_highs")
@pytest.mark.parametrize("value", [1.0, 0.0, 0.4, None, math.nan])
def test_garbage_of_a_program_is_said_and_done_without(value: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program answers as if it had taken all options, none, a part of each, or told nothing."""

    def answer(program: pulp.LpProblem, *_: object, **__: object) -> None:
        program.assignVarsVals({variable.name: value for variable in program.variables()})
        program.assignStatus(pulp.LpStatusOptimal)

    expected = hard_division()
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", lambda self, program, **_: answer(program))
    found = hard_division()
    assert found.assignment == expected.assignment
    assert found.solver == "exact search"
    assert found.notes == ("CBC gave no division within the budget; solved without it",)


@pytest.mark.usefixtures("without_search", "without_highs")
def test_a_program_that_is_stopped_by_the_time_limit_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(self: object, program: pulp.LpProblem, **_: object) -> None:
        program.assignVarsVals({variable.name: 0 for variable in program.variables()})
        program.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)

    monkeypatch.setattr(pulp.PULP_CBC_CMD, "actualSolve", stopped)
    assert hard_division().notes[0] == "CBC was stopped by the time limit"


@pytest.mark.usefixtures("without_search")
@pytest.mark.parametrize("wrong", ["slowest", "too much"])
def test_a_wrong_answer_of_a_program_does_no_harm(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hard_division().assignment

    def answer(name: str, core: list[list[knapsack.Row]], *_: object) -> tuple[list[knapsack.Row] | None, bool]:
        return ([rows[0] for rows in core] if wrong == "slowest" else None), True

    monkeypatch.setattr(knapsack, "_run_program", answer)
    assert hard_division().assignment == expected
    monkeypatch.setattr(knapsack, "MOST_SUMS", 0)
    options = correlated()
    without = solve_wd(options, least_bytes(options) + 1701, time_limit_s=0.0)
    assert hard_division().objective_s == without.objective_s


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
