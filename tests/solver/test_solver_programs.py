"""WR and WD on 1,000 random networks, against brute force over all covers of all batches."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import pytest
from support.problems.solver_cases import Key, Problem, all_keys, key_of, random_problem

from mucudnn.solver.account import Status
from mucudnn.solver.division import Division, solve_wd
from mucudnn.solver.front import desirable_sets
from mucudnn.solver.reuse import solve_wr
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.results import Configuration

CASES = 1000


@dataclass(frozen=True)
class Network:
    problems: list[Problem]
    spare_bytes: int  # the budget is so much above the smallest feasible one

    @cached_property
    def options(self) -> dict[int, tuple[Configuration, ...]]:
        return {i: desirable_sets(p.measurements, p.batch_size).of(p.batch_size) for i, p in enumerate(self.problems)}

    @cached_property
    def smallest_bytes(self) -> int:
        return sum(front[0].workspace_bytes for front in self.options.values())

    @property
    def budget_bytes(self) -> int:
        return self.smallest_bytes + self.spare_bytes

    @cached_property
    def division(self) -> Division[int]:
        return solve_wd(self.options, self.budget_bytes, counts={i: p.count for i, p in enumerate(self.problems)})


@cache
def networks(problems: int, algorithms: int, largest: int) -> list[Network]:
    source = random.Random(problems)
    return [
        Network(
            [random_problem(source, algorithms, largest) for _ in range(source.randint(1, problems))],
            source.choice([0, 1, 2, 4, 8]),
        )
        for _ in range(CASES)
    ]


def test_wr_is_the_best_of_all_covers_at_every_limit_that_matters() -> None:
    for network in networks(1, 4, 4):
        (problem,) = network.problems
        keys = all_keys(problem.measurements, problem.batch_size)
        smallest = min(key[1] for key in keys)
        for limit in {smallest, smallest + network.spare_bytes, None}:
            best = min(key for key in keys if limit is None or key[1] <= limit)
            assert key_of(solve_wr(problem.measurements, problem.batch_size, limit)) == best
        if smallest:
            with pytest.raises(InfeasibleError) as failure:
                solve_wr(problem.measurements, problem.batch_size, smallest - 1)
            assert failure.value.smallest_feasible_bytes == smallest


def test_wd_is_the_best_of_all_covers_of_all_problems() -> None:
    for network in networks(3, 2, 2):
        every = [all_keys(p.measurements, p.batch_size) for p in network.problems]
        smallest = sum(min(key[1] for key in keys) for keys in every)
        budget = smallest + network.spare_bytes
        fitting = (keys for keys in product(*every) if sum(key[1] for key in keys) <= budget)
        found = network.division
        chosen = tuple(key_of(configuration) for configuration in found.assignment.values())
        counts = [p.count for p in network.problems]
        assert _order(chosen, counts) == min(_order(keys, counts) for keys in fitting)
        assert found.status is Status.OPTIMAL
        assert found.workspace_bytes <= budget == smallest + network.spare_bytes == found.budget_bytes


def _order(keys: tuple[Key, ...], counts: list[int]) -> tuple[int, int, int]:
    return (
        sum(key[0] * count for key, count in zip(keys, counts, strict=True)),
        sum(key[1] for key in keys),
        sum(key[2] for key in keys),
    )
