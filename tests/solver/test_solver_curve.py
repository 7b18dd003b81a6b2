"""Curves of time against budget: compared with exact divisions, and what is said about more and less memory."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from support.problems.solver_cases import Options, configuration, least_bytes

from mucudnn.core.errors import InfeasibleError
from mucudnn.solver.division import budget_curve, limit_curve, solve_wd

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
    for point in budget_curve(options, counts):
        assert point.time_s == pytest.approx(solve_wd(options, point.size_bytes, counts=counts).objective_s)


@pytest.mark.parametrize("seed", range(20))
def test_it_goes_from_the_smallest_feasible_budget_to_where_nothing_more_is_bought(seed: int) -> None:
    options = random_options(seed)
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
    options = random_options(seed)
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
