"""Memory that is not to be had on the CPU: torch's own convolution computes the call, in the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mucudnn.core import errors
from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.core.records import Configuration, MicroConfig
from mucudnn.kernels.algorithm import BaseAlgorithm
from mucudnn.kernels.registry import algorithms
from mucudnn.kernels.torch_convolution import torch_convolution
from mucudnn.running import operators
from mucudnn.running.choices import Choices
from mucudnn.running.executable import Executable
from mucudnn.running.workspace import release_workspaces

FORWARD = ConvProblem(Operation.FORWARD, 4, 9, 8, 6, 3, 3, padding=(1, 1))
N = 3  # What is left of the address space is enough for torch's own convolution, not for gemm's 77 MiB.


@pytest.fixture(autouse=True)
def workspaces() -> Iterator[None]:
    """Nothing is kept from tests before, and nothing was said."""
    release_workspaces()
    errors._said.clear()
    yield
    errors._said.clear()


class Call:
    """One operation, tuned to two micro-batches of one algorithm, and its operands."""

    def __init__(self, operation: Operation, name: str) -> None:
        problem = FORWARD.with_operation(operation)
        self.operation = operation
        halves = Configuration((MicroConfig(name, N - 1), MicroConfig(name, 1)), 1.0, 2**20)
        self.choices = Choices.of({problem: {N: halves}}, keeps_workspace=False)
        self.x, self.w = torch.randn(problem.x_shape(N)), torch.randn(problem.w_shape())
        self.third = torch.randn(problem.k if operation is Operation.FORWARD else problem.y_shape(N))
        self.geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)

    def __call__(self) -> Tensor:
        return operators.OPERATORS[self.operation](self.x, self.w, self.third, *self.geometry, self.choices.handle)

    def torchs(self) -> Tensor:
        return torch_convolution(self.operation, self.x, self.w, self.third, self.geometry)


ALGORITHMS = {algorithm.name: algorithm for algorithm in algorithms() if not algorithm.supports(FORWARD)}


class LackingAtTheEnd:
    """A bound stage."""

    entry = None

    def __init__(self, stage: Callable[..., object]) -> None:
        self.stage = stage

    def __call__(self, *addresses: object) -> None:
        self.stage(*addresses)
        raise cpu_lacks_memory()


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("method", ["open", "step", "close", "bound"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_may_lack_memory_when_it_has_done_a_part(
    monkeypatch: pytest.MonkeyPatch, name: str, method: str, operation: Operation
) -> None:
    call, algorithm = Call(operation, name), type(ALGORITHMS[name])
    done = getattr(algorithm, method)
    if done is BaseAlgorithm.bound:
        pytest.skip("it is called part by part alone")

    def lack_memory_at_the_end(*arguments: object, **named: object) -> object:
        result = done(*arguments, **named)
        if method == "bound":
            return LackingAtTheEnd(result)
        raise cpu_lacks_memory()

    tuned = call()
    with monkeypatch.context() as patch:
        patch.setattr(algorithm, "bound", lambda *_, **__: None)
        patch.setattr(algorithm, method, lack_memory_at_the_end)
        call.choices.executables.clear()
        with pytest.warns(RuntimeWarning) as said:
            computed = [call() for _ in range(2)]
    assert all(torch.equal(result, call.torchs()) for result in computed)
    assert [str(warning.message) for warning in said] == [
        f"no memory for what was tuned for {operation}, x (3, 4, 9, 8), w (6, 4, 3, 3); torch's own convolution runs "
        "instead"
    ]
    call.choices.executables.clear()
    assert torch.equal(call(), tuned)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("expected"), ValueError("1")]
)
def test_python_and_cpp_may_lack_memory_and_other_errors_are_raised(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    call = Call(Operation.FORWARD, "gemm")
    monkeypatch.setattr(type(ALGORITHMS["gemm"]), "bound", lambda *_: None)  # part by part
    monkeypatch.setattr(Executable, "execute", failing(error))
    if isinstance(error, MemoryError) or "alloc" in str(error):
        with pytest.warns(RuntimeWarning, match="no memory"):
            assert torch.equal(call(), call.torchs())
        return
    with pytest.raises(type(error), match=str(error)):
        call()


def cpu_lacks_memory() -> RuntimeError:
    """A new one: errors that are kept keep the tensors in their frames."""
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 65028096 bytes. Error code 12 (Cannot allocate memory)"
    )


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail
