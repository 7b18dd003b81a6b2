"""Float64 results at a few places: an exact result has no error, what is wrong is seen, in the memory stated."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.kernels.torch_convolution import reference
from mucudnn.measuring.float64_results import Float64Results
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.testing.contract import random_problem

N = 3


def with_exact_result(problem: ConvProblem) -> tuple[Operands, torch.Tensor]:
    operands = random_operands(problem, N)
    written = operands.written(problem.operation)
    written.copy_(reference(problem, operands.x, operands.w, operands.y))
    return operands, written


@pytest.mark.parametrize("operation", Operation)
def test_at_some_places_an_exact_result_has_no_error_and_a_factor_is_seen(operation: Operation) -> None:
    drawn = (random_problem(random.Random(seed), volumes=True) for seed in range(60))
    for problem in (replace(p, operation=operation, dtype="float32") for p in drawn if p is not None):
        operands, written = with_exact_result(problem)
        if not written.all():  # some results are sums over padding alone, and no factor shows there
            continue
        results = Float64Results(problem, operands)
        assert results.error(written, N) < 1e-6, problem
        written.mul_(1.01)
        assert results.error(written, N) == pytest.approx(0.01, rel=0.01), problem


@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA])
def test_corners_of_the_first_and_the_last_sample_are_compared(operation: Operation) -> None:
    problem = ConvProblem(operation, c=2, h=40, w=50, k=3, r=3, s=3, padding=(1, 1))
    for sample, row, column in product((0, -1), repeat=3):
        operands, written = with_exact_result(problem)
        written[sample, :, row, column] += 100
        assert Float64Results(problem, operands).error(written, N) > 1


@pytest.mark.parametrize("operation", Operation)
def test_errors_are_of_the_number_of_samples_given(operation: Operation) -> None:
    problem = ConvProblem(operation, 8, 20, 20, 16, 3, 3, padding=(1, 1))
    operands = random_operands(problem, 32)
    results = Float64Results(problem, operands)
    for n in (1, 8, 32, 4):
        exact = reference(problem, operands.x[:n], operands.w, operands.y[:n])
        assert results.error(exact, n) < 1e-12


@pytest.mark.parametrize("operation", Operation)
def test_the_memory_is_bounded_as_stated(operation: Operation) -> None:
    for c, size, batch_size in ((8, 20, 32), (64, 14, 4), (3, 40, 8), (2, 64, 32)):
        problem = ConvProblem(operation, c, size, size, 2 * c, 3, 3, padding=(1, 1))
        operands = random_operands(problem, batch_size)
        results = Float64Results(problem, operands)
        for n in (1, batch_size // 2, batch_size):
            check = partial(results.error, operands.first(n).written(operation), n)
            assert peak_allocated_bytes(check) <= results.peak_bytes(), (problem, n)
