"""Curves of time against budget: compared with exact divisions, and what is said about more and less memory."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from support.problems.solver_cases import Options, configuration, least_bytes

from mucudnn.solver.curve import marginal, next_faster, time_curve
from mucudnn.solver.division import Division, DivisionProblem, solve_wd
from mucudnn.words.errors import InfeasibleError, InvalidInputError

MIB = 2**20


def random_options(seed: int, problems: int = 6, most: int = 6) -> Options:
    source = random.Random(seed)
    return {
        f"p{i}": [
            configuration(f"a{j}", source.randint(1, 90) * 1e-3, source.randint(0, 90))
            for j in range(source.randint(1, most))
        ]
        for i in range(problems)
    }


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
    options = random_options(seed)
    counts = {key: 1 + i % 3 for i, key in enumerate(options)}
    curve = time_curve(options, counts, points=12, constant_s=0.5)
    for point in curve.points:
        exact = solve_wd(options, point.budget_bytes, counts=counts)
        assert point.time_s == pytest.approx(exact.objective_s + 0.5)
        assert point.bound_s == point.time_s
        assert point.workspace_bytes == exact.workspace_bytes <= point.budget_bytes


@pytest.mark.parametrize("seed", range(20))
def test_it_goes_from_the_smallest_feasible_budget_to_where_nothing_more_is_bought(seed: int) -> None:
    options = random_options(seed)
    curve = time_curve(options)
    first, last = curve.points[0], curve.points[-1]
    assert first.budget_bytes == curve.smallest_feasible_bytes == least_bytes(options)
    assert last.budget_bytes == curve.enough_bytes
    assert last.time_s == pytest.approx(solve_wd(options, None).objective_s)
    if curve.enough_bytes > curve.smallest_feasible_bytes:
        assert solve_wd(options, curve.enough_bytes - 1).objective_s > last.time_s
    for less, more in pairwise(curve.points):
        assert less.budget_bytes < more.budget_bytes
        assert less.time_s > more.time_s


def test_budgets_that_are_asked_for_are_on_it() -> None:
    curve = time_curve(STAIRS, points=2, budgets=[200 * MIB, 10**12])
    assert [(p.budget_bytes, p.time_s, p.workspace_bytes // MIB) for p in curve.points] == [
        (64 * MIB, 10e-3, 64),
        (200 * MIB, 8e-3, 128),
        (256 * MIB, 5e-3, 256),
        (10**12, 5e-3, 256),
    ]
    assert json.loads(json.dumps(curve.to_json()))["points"][1]["time_s"] == 8e-3
    with pytest.raises(InfeasibleError, match=rf"smallest feasible budget is {64 * MIB}B"):
        time_curve(STAIRS, budgets=[64 * MIB - 1])


def test_where_the_time_ends_for_some_points_it_still_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    options = random_options(3, problems=30, most=20)
    budgets = range(least_bytes(options), least_bytes(options) + 400, 3)
    exact = time_curve(options, points=2, budgets=budgets).points
    divide = DivisionProblem.divide

    def hurried_at_times(choices: DivisionProblem[str], budget: int, time_limit_s: float | None) -> Division[str]:
        return divide(choices, budget, 0.0 if budget % 2 else time_limit_s)

    monkeypatch.setattr(DivisionProblem, "divide", hurried_at_times)
    hurried = time_curve(options, points=2, budgets=budgets).points
    assert [p.time_s for p in hurried] == sorted((p.time_s for p in hurried), reverse=True)
    assert sum(p.bound_s < p.time_s for p in hurried) > 20
    for quick, best in zip(hurried, exact, strict=True):
        assert quick.bound_s - 1e-12 <= best.time_s <= quick.time_s
        assert quick.workspace_bytes <= quick.budget_bytes


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (
            64 * MIB,
            # 16 and 32 MiB more change nothing, 64 do
            "64 MiB more: 20 % faster; less is not feasible: 64 MiB is the smallest budget",
        ),
        (
            128 * MIB,
            "128 MiB more: 38 % faster (everything is at its fastest from 256 MiB on); 32 MiB less: 25 % slower",
        ),
        (
            66 * MIB,
            "64 MiB more: 20 % faster; 2 MiB less: no slower (64 MiB is the smallest feasible budget)",
        ),
        (
            256 * MIB,
            "more memory buys nothing: everything is at its fastest from 256 MiB on; 64 MiB less: 60 % slower",
        ),
        (
            None,
            "more memory buys nothing: everything is at its fastest from 256 MiB on; 64 MiB less: 60 % slower",
        ),
        (
            1024 * MIB,
            "more memory buys nothing: everything is at its fastest from 256 MiB on; 256 MiB less: no slower",
        ),
    ],
)
def test_more_and_less_memory_in_words(budget: int | None, words: str) -> None:
    said = marginal(STAIRS, None, budget)
    assert str(said) == words
    assert json.loads(json.dumps(said.to_json()))["words"] == words


@pytest.mark.parametrize("seed", range(10))
def test_marginals_are_exact_divisions(seed: int) -> None:
    options = random_options(seed)
    budget = least_bytes(options) + 40
    said = marginal(options, None, budget)
    for point in (said.here, said.more, said.less):
        if point is not None:
            assert point.time_s == pytest.approx(solve_wd(options, point.budget_bytes).objective_s)
    assert said.less is not None
    assert said.less.budget_bytes < budget
    assert said.less.time_s >= said.here.time_s
    assert said.more is None or said.more.time_s < said.here.time_s


def test_the_next_faster_configuration_needs_least_more() -> None:
    small, middle, large = STAIRS["p"]
    wasteful = configuration("wasteful", 9e-3, 200 * MIB)
    options = [large, wasteful, small, middle]
    assert next_faster(options, small) == middle
    assert next_faster(options, middle) == large
    assert next_faster(options, large) is None
    thrifty = configuration("thrifty", 8.5e-3, 10 * MIB)
    assert next_faster([*options, thrifty], wasteful) == middle  # neither needs more than now, so the faster one
    assert next_faster([], small) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"points": 1}, "points is 1"),
        ({"budgets": [-1]}, "budget is -1 bytes"),
        ({"budgets": [1.5]}, r"budget is 1\.5 bytes"),
        ({"constant_s": float("nan")}, "constant_s is nan"),
        ({"constant_s": -1.0}, r"constant_s is -1\.0"),
        ({"time_limit_s": -1.0}, r"time limit is -1\.0"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        time_curve(STAIRS, **arguments)
