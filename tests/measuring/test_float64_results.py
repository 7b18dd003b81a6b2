"""Float64 results: in pieces as at once, in the memory that is stated; at some places what is wrong is seen, too."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.memory import peak_allocated_bytes
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.measuring import float64_results
from mucudnn.measuring.float64_results import ExactResults, SampledResults
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.testing.contract import GEOMETRIES, geometry, random_problem

BATCH = 13
N = 3


@pytest.fixture(params=["all at once", "few", "one by one"])
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How much is affordable."""
    flops, size = {"all at once": (4e9, 2**26), "few": (4e9, 2**16), "one by one": (0.0, 1)}[request.param]
    monkeypatch.setattr(float64_results, "_FLOPS", flops)
    monkeypatch.setattr(float64_results, "_BYTES", size)
    return str(request.param)


def whole(problem: ConvProblem, operands: Operands, n: int) -> torch.Tensor:
    return reference(problem, operands.x[:n], operands.w, operands.y[:n])


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("name", [*GEOMETRIES, "volume", "volume-stride"])
def test_pieces_make_the_whole(budget: str, operation: Operation, name: str) -> None:
    problem, _, _ = geometry(name, operation)
    operands = random_operands(problem, BATCH)
    exact = ExactResults(problem, operands)
    for n in (1, 2, 8, BATCH, 4):  # sums go on, and begin anew where fewer are asked for
        expected = whole(problem, operands, n)
        if operation is not Operation.BACKWARD_FILTER:
            expected = expected[list(exact.compared(n))]
        torch.testing.assert_close(exact.expected(n)[1], expected, rtol=1e-12, atol=1e-10)


def test_the_first_and_the_last_sample_are_compared_and_what_is_affordable_between(budget: str) -> None:
    problem, _, _ = geometry("same-3x3", Operation.FORWARD)
    exact = ExactResults(problem, random_operands(problem, BATCH))
    for n in range(1, BATCH + 1):
        compared = list(exact.compared(n))
        assert compared == sorted(set(compared))
        assert (compared[0], compared[-1]) == (0, n - 1)
        assert len(compared) == min(n, max(3, exact.affordable))


@pytest.mark.parametrize("operation", Operation)
def test_the_error_is_that_of_the_samples_compared(budget: str, operation: Operation) -> None:
    problem, _, _ = geometry("same-3x3", operation)
    operands = random_operands(problem, BATCH)
    exact = ExactResults(problem, operands)
    result = whole(problem, operands, BATCH)
    assert exact.error(result, BATCH) <= 1e-12
    last = result[-1:]  # always compared, and of dw a part of the whole
    last *= 1.5
    of = slice(None) if operation is Operation.BACKWARD_FILTER else exact.compared(BATCH)
    assert exact.error(result, BATCH) == pytest.approx(
        relative_l2_error(result[of], whole(problem, operands, BATCH)[of])
    )


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("size", [2**14, 2**18, 2**22])
def test_the_memory_is_bounded_as_stated(monkeypatch: pytest.MonkeyPatch, operation: Operation, size: int) -> None:
    monkeypatch.setattr(float64_results, "_BYTES", size)
    problem = ConvProblem(operation, 8, 20, 20, 16, 3, 3, padding=(1, 1))
    operands = random_operands(problem, 32)

    def compare() -> None:
        exact = ExactResults(problem, operands)
        for n in (1, 8, 32):
            exact.error(
                operands.written(operation)[:n] if operation is not Operation.BACKWARD_FILTER else operands.w, n
            )

    assert peak_allocated_bytes(compare) <= ExactResults(problem, operands).peak_bytes()


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
        sampled = SampledResults(problem, operands)
        assert sampled.error(written, N) < 1e-6, problem
        written.mul_(1.01)
        assert sampled.error(written, N) == pytest.approx(0.01, rel=0.01), problem


@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA])
def test_corners_of_the_first_and_the_last_sample_are_compared(operation: Operation) -> None:
    problem = ConvProblem(operation, c=2, h=40, w=50, k=3, r=3, s=3, padding=(1, 1))
    for sample, row, column in product((0, -1), repeat=3):
        operands, written = with_exact_result(problem)
        written[sample, :, row, column] += 100
        assert SampledResults(problem, operands).error(written, N) > 1
