"""Errors estimated at some places: exact results have none, and what is wrong is seen, whatever the geometry."""

from __future__ import annotations

import random

import pytest
import torch

from mucudnn.kernels.contract.reference import reference
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.measuring.sampled_results import SampledResults
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

N = 3


def random_problem(operation: Operation, rng: random.Random) -> ConvProblem:
    while True:
        groups = rng.choice([1, 1, 2, 4])
        try:
            return ConvProblem(
                operation,
                c=groups * rng.choice([1, 2, 5]),
                h=rng.randint(3, 12),
                w=rng.randint(3, 12),
                k=groups * rng.choice([1, 3, 4]),
                r=rng.choice([1, 3, 5]),
                s=rng.choice([1, 2, 3]),
                stride=(rng.randint(1, 3), rng.randint(1, 3)),
                padding=(rng.randint(0, 3), rng.randint(0, 2)),
                dilation=(rng.randint(1, 2), rng.randint(1, 2)),
                groups=groups,
                memory_format=rng.choice(list(MemoryFormat)),
            )
        except InvalidInputError:
            continue


def with_exact_result(problem: ConvProblem) -> tuple[Operands, torch.Tensor]:
    operands = random_operands(problem, N)
    written = operands.written(problem.operation)
    written.copy_(reference(problem, operands.x, operands.w, operands.y))
    return operands, written


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("operation", Operation)
def test_an_exact_result_has_no_error_and_a_factor_is_seen(operation: Operation, seed: int) -> None:
    problem = random_problem(operation, random.Random(seed))
    operands, written = with_exact_result(problem)
    sampled = SampledResults(problem, operands)
    assert sampled.error(written, N) < 1e-6
    written.mul_(1.01)
    assert sampled.error(written, N) == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA])
@pytest.mark.parametrize("corner", [(0, 0), (0, -1), (-1, 0), (-1, -1)])
@pytest.mark.parametrize("sample", [0, -1])
def test_corners_of_the_first_and_the_last_sample_are_compared(
    operation: Operation, corner: tuple[int, int], sample: int
) -> None:
    problem = ConvProblem(operation, c=2, h=40, w=50, k=3, r=3, s=3, padding=(1, 1))
    operands, written = with_exact_result(problem)
    written[sample, :, corner[0], corner[1]] += 100
    assert SampledResults(problem, operands).error(written, N) > 1


def test_of_many_groups_and_channels_the_first_and_the_last_are_compared() -> None:
    problem = ConvProblem(Operation.BACKWARD_FILTER, c=60, h=6, w=6, k=120, r=3, s=3, groups=6)
    for output, tap in ((0, 0), (119, 9)):
        operands, written = with_exact_result(problem)
        written[output, tap] += 100
        assert SampledResults(problem, operands).error(written, N) > 0.5


def test_what_is_not_finite_is_an_infinite_error() -> None:
    problem = ConvProblem(Operation.FORWARD, c=2, h=5, w=5, k=3, r=3, s=3)
    operands, written = with_exact_result(problem)
    written.fill_(float("nan"))
    assert SampledResults(problem, operands).error(written, N) == float("inf")
