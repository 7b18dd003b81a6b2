"""Float64 results in pieces: the same numbers as at once, in the memory that is stated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.measuring import exact_results
from mucudnn.measuring.exact_results import ExactResults
from mucudnn.measuring.operands import Operands, random_operands
from mucudnn.testing.geometries import GEOMETRIES, geometry
from mucudnn.words.problem import ConvProblem, Operation
from mucudnn.words.torch_settings import computed_without_libraries

BATCH = 13


@pytest.fixture(params=["all at once", "few", "one by one"])
def budget(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How much is affordable."""
    flops, size = {"all at once": (4e9, 2**26), "few": (4e9, 2**16), "one by one": (0.0, 1)}[request.param]
    monkeypatch.setattr(exact_results, "_FLOPS", flops)
    monkeypatch.setattr(exact_results, "_BYTES", size)
    return str(request.param)


def whole(problem: ConvProblem, operands: Operands, n: int) -> torch.Tensor:
    return reference(problem, operands.x[:n], operands.w, operands.y[:n])


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_pieces_make_the_whole(budget: str, operation: Operation, name: str) -> None:
    problem, _, _ = geometry(name, operation)
    operands = random_operands(problem, BATCH)
    exact = ExactResults(problem, operands)
    for n in (1, 2, 8, BATCH, 4):  # sums go on, and begin anew where fewer are asked for
        expected = whole(problem, operands, n)
        if operation is not Operation.BACKWARD_FILTER:
            expected = expected[list(exact.compared(n))]
        torch.testing.assert_close(exact.result(n), expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("n", range(1, BATCH + 1))
def test_the_first_and_the_last_sample_are_compared_and_what_is_affordable_between(budget: str, n: int) -> None:
    problem, _, _ = geometry("same-3x3", Operation.FORWARD)
    exact = ExactResults(problem, random_operands(problem, BATCH))
    compared = list(exact.compared(n))
    assert compared == sorted(set(compared))
    assert compared[0] == 0
    assert compared[-1] == n - 1
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
    assert exact.error(result, BATCH) == pytest.approx(
        relative_l2_error(
            result[list(exact.compared(BATCH))], whole(problem, operands, BATCH)[list(exact.compared(BATCH))]
        )
        if operation is not Operation.BACKWARD_FILTER
        else relative_l2_error(result, whole(problem, operands, BATCH))
    )


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("size", [2**14, 2**18, 2**22])
def test_the_memory_is_bounded_as_stated(monkeypatch: pytest.MonkeyPatch, operation: Operation, size: int) -> None:
    monkeypatch.setattr(exact_results, "_BYTES", size)
    problem = ConvProblem(operation, 8, 20, 20, 16, 3, 3, padding=(1, 1))
    operands = random_operands(problem, 32)

    def compare() -> None:
        exact = ExactResults(problem, operands)
        for n in (1, 8, 32):
            exact.error(
                operands.written(operation)[:n] if operation is not Operation.BACKWARD_FILTER else operands.w, n
            )

    assert peak_allocated_bytes(compare) <= ExactResults(problem, operands).peak_bytes()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    yield
    torch._C._set_deterministic_algorithms(False)


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_cudnn_does_not_confirm_itself_and_settings_are_restored(deterministic: None, fails: bool) -> None:
    assert torch.backends.cudnn.enabled
    try:
        with computed_without_libraries():
            assert not torch.backends.cudnn.enabled
            assert not torch.are_deterministic_algorithms_enabled()
            if fails:
                raise RuntimeError("no memory")
    except RuntimeError:
        assert fails
    assert torch.backends.cudnn.enabled
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
