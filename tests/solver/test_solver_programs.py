"""1,000 random networks: WR and WD against brute force, and against another integer program of the whole cost model.

The other program knows no desirable sets: it counts micro-batches, marks the algorithms in use for their setup and
prepared bytes, and takes the scratch of a problem as a maximum. Independent networks share one program.
"""

from __future__ import annotations

import importlib.util
import random
import warnings
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

import pulp
import pytest
from support.problems.solver_cases import US, Key, Problem, all_keys, key_of, random_problem

from mucudnn.solver.account import Status
from mucudnn.solver.division import Division, solve_wd
from mucudnn.solver.front import desirable_sets
from mucudnn.solver.reuse import solve_wr
from mucudnn.words.errors import InfeasibleError
from mucudnn.words.results import Configuration

CASES = 1000
TOGETHER = 10  # networks in one program


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


@pytest.mark.parametrize("problems", [1, 3], ids=["WR", "WD"])
def test_another_integer_program_finds_the_same_time(problems: int) -> None:
    for group in groups(networks(problems, 3, 4)):
        program = Program([network.problems for network in group])
        program.minimize_times([network.budget_bytes for network in group])
        for network, time_us in zip(group, program.times_us(), strict=True):
            assert round(network.division.objective_s / US) == time_us
            if problems == 1:
                (problem,) = network.problems
                chosen = solve_wr(problem.measurements, problem.batch_size, network.budget_bytes)
                assert round(chosen.time_s / US) * problem.count == time_us


def test_another_integer_program_finds_the_same_smallest_budget() -> None:
    for group in groups(networks(3, 3, 4)[:200]):
        program = Program([network.problems for network in group])
        program.minimize_workspaces()
        assert [network.smallest_bytes for network in group] == program.workspaces()


def groups(every: list[Network]) -> list[list[Network]]:
    return [every[start : start + TOGETHER] for start in range(0, len(every), TOGETHER)]


class Program:
    """Some networks, each for itself: x micro-batches of each micro-config, u = 1 where an algorithm is in use."""

    def __init__(self, every: list[list[Problem]]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._program = pulp.LpProblem("networks", pulp.LpMinimize)
            self._names = 0
            costs = [[self._add(problem) for problem in problems] for problems in every]
        self._times = [pulp.lpSum(time for time, _ in network) for network in costs]
        self._workspaces = [pulp.lpSum(workspace for _, workspace in network) for network in costs]

    def _add(self, problem: Problem) -> tuple[pulp.LpAffineExpression, pulp.LpAffineExpression]:
        """Time in us and workspace."""
        n, program = problem.batch_size, self._program
        setups = {m.micro_config.algorithm: (round(m.setup_s / US), m.prepared_bytes) for m in problem.measurements}
        used = {algorithm: self._variable(1) for algorithm in setups}
        scratch = self._variable(None, "Continuous")
        time = pulp.lpSum(problem.count * setup * used[algorithm] for algorithm, (setup, _) in setups.items())
        covered = pulp.LpAffineExpression()
        for m in problem.measurements:
            size = m.micro_config.micro_batch_size
            if size <= n:
                often, at_all = self._variable(n // size), self._variable(1)
                program += often <= n // size * at_all
                program += at_all <= used[m.micro_config.algorithm]
                program += m.scratch_bytes * at_all <= scratch
                time += problem.count * round(m.step_s / US) * often
                covered += size * often
        program += covered == n
        prepared = pulp.lpSum(size_bytes * used[algorithm] for algorithm, (_, size_bytes) in setups.items())
        return time, prepared + scratch

    def _variable(self, most: int | None, category: str = "Integer") -> pulp.LpVariable:
        self._names += 1
        return pulp.LpVariable(f"v{self._names}", 0, most, category)

    def minimize_times(self, budgets: list[int]) -> None:
        for workspace, budget in zip(self._workspaces, budgets, strict=True):
            self._program += workspace <= budget
        self._minimize(pulp.lpSum(self._times))

    def minimize_workspaces(self) -> None:
        self._minimize(pulp.lpSum(self._workspaces))

    def _minimize(self, objective: pulp.LpAffineExpression) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self._program += objective
            solver = pulp.HiGHS if importlib.util.find_spec("highspy") else pulp.PULP_CBC_CMD
            self._program.solve(solver(msg=False, threads=1, gapRel=0.0))
        assert self._program.sol_status == pulp.LpSolutionOptimal

    def times_us(self) -> list[int]:
        return [round(pulp.value(time)) for time in self._times]

    def workspaces(self) -> list[int]:
        return [round(pulp.value(workspace)) for workspace in self._workspaces]
