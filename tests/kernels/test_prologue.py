"""The prologue: what a convolution computes of x as it reads x, so that no norm's result is in memory."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from support.compiled import algorithm

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.algorithm import Epilogue, Prologue, fuses_normalization, zero_moments
from mucudnn.kernels.compiled import normalization
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.compiled.normalization import Norm
from mucudnn.kernels.torch_convolution import relative_l2_error
from mucudnn.testing.checks import Call, check_normalization, random_prologue, threads

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")

FUNCTIONS = (None, "ReLU", "ReLU6", "SiLU", "hardswish", "leaky_relu", "gelu", "gelu_tanh")
OPERATIONS = (Operation.FORWARD, Operation.BACKWARD_FILTER)
# Sizes of problems: channels and pixels that do not fill vectors, strides, groups, rows of several bands, filters that
# are read in one pass and in several, and dw of pixels in place and of copied ones.
SIZES: dict[str, list[dict[str, Any]]] = {
    "pointwise": [
        {"c": 37, "h": 20, "w": 17, "k": 24},
        {"c": 6, "h": 40, "w": 33, "k": 8},
        {"c": 300, "h": 13, "w": 9, "k": 200},
        {"c": 24, "h": 23, "w": 22, "k": 46, "groups": 2, "stride": (2, 1)},
    ],
    "depthwise": [
        {"c": 37, "h": 15, "w": 13, "k": 37, "r": 3, "s": 3, "padding": (1, 1), "groups": 37},
        {"c": 96, "h": 56, "w": 50, "k": 96, "r": 3, "s": 3, "padding": (1, 1), "groups": 96, "stride": (2, 2)},
        {"c": 64, "h": 40, "w": 200, "k": 64, "r": 3, "s": 3, "padding": (1, 1), "groups": 64},
        {"c": 16, "h": 9, "w": 41, "k": 16, "r": 5, "s": 7, "padding": (4, 3), "groups": 16, "dilation": (2, 1)},
        {"c": 20, "h": 19, "w": 18, "k": 20, "r": 5, "s": 5, "padding": (2, 2), "groups": 20, "stride": (3, 3)},
    ],
}


def problem_of(sizes: dict[str, Any], operation: Operation, memory_format: MemoryFormat, dtype: str) -> ConvProblem:
    return ConvProblem(operation, dtype=dtype, memory_format=memory_format, **({"r": 1, "s": 1} | sizes))


@pytest.mark.parametrize("name", SIZES)
def test_it_is_the_convolution_of_what_normalization_computes(name: str) -> None:
    cases = product(SIZES[name], OPERATIONS, MemoryFormat)
    for number, (sizes, operation, memory_format) in enumerate(cases):
        torch.manual_seed(number)
        function = FUNCTIONS[number % len(FUNCTIONS)]
        call = Call(problem_of(sizes, operation, memory_format, "float32"), 5)
        prologue = random_prologue(call.problem.c, function)
        apart = Call(call.problem, 5)
        apart.y.copy_(call.y)
        apart.w.copy_(call.w)
        with threads(number % 3 + 1):
            norm = Norm(0, 1e-5, function, prologue.slope)
            z, _ = normalization.forward(call.x, norm, *_vectors(prologue))
            apart.x.copy_(z)
            together = call.run(algorithm(name), [3, 2], prologue=prologue)
            expected = apart.run(algorithm(name), [3, 2])
        if operation is Operation.FORWARD:
            assert torch.equal(together, expected), (sizes, memory_format, function)
        assert relative_l2_error(together, expected.double()) < 1e-6, (sizes, memory_format, function)


def _vectors(prologue: Prologue) -> tuple[Any, ...]:
    return prologue.mean, prologue.inverse, prologue.weight, prologue.bias


@pytest.mark.parametrize("name", SIZES)
def test_every_function_in_every_dtype(name: str) -> None:
    dtypes = DEFAULT_MAX_RELATIVE_ERROR.items()
    cases = product(SIZES[name][:3], OPERATIONS, MemoryFormat, dtypes)
    for number, (sizes, operation, memory_format, (dtype, bound)) in enumerate(cases):
        problem = problem_of(sizes, operation, memory_format, dtype)
        if fuses_normalization(algorithm(name), problem) and algorithm(name).supports(problem) is None:
            torch.manual_seed(number)
            with threads(number % 4 + 1):
                check_normalization(algorithm(name), problem, [2, 3], bound, FUNCTIONS[number % len(FUNCTIONS)])


def test_norms_without_parameters() -> None:
    problem = problem_of(SIZES["pointwise"][0], Operation.FORWARD, MemoryFormat.CHANNELS_LAST, "float32")
    call = Call(problem, 2)
    prologue = random_prologue(problem.c, "ReLU")
    ones, zeros = torch.ones(problem.c), torch.zeros(problem.c)
    expected = call.run(algorithm("pointwise"), [2], prologue=Prologue(prologue.mean, prologue.inverse, ones, zeros))
    expected = expected.clone()
    assert torch.equal(call.run(algorithm("pointwise"), [2], prologue=Prologue(*_vectors(prologue)[:2])), expected)


@pytest.mark.parametrize("name", SIZES)
def test_moments_and_a_prologue_in_one_call(name: str) -> None:
    for sizes in SIZES[name]:
        problem = problem_of(sizes, Operation.FORWARD, MemoryFormat.CHANNELS_LAST, "float32")
        call, prologue, moments = Call(problem, 3), random_prologue(problem.c, "ReLU"), zero_moments(problem.k)
        alone = call.run(algorithm(name), [3], prologue=prologue).clone()
        y = call.run(algorithm(name), [3], None, Epilogue(moments=moments), prologue)
        assert torch.equal(y, alone)
        counts, means, squares = moments[0, :3, : problem.k]
        values = alone.double().transpose(0, 1).flatten(1)
        assert (counts == values.shape[1]).all()
        assert torch.allclose(means, values.mean(1), rtol=1e-6, atol=1e-6)
        assert torch.allclose(squares / counts, values.var(1, correction=0), rtol=1e-5)


def test_what_is_refused() -> None:
    sizes, last = SIZES["pointwise"][0], MemoryFormat.CHANNELS_LAST
    problem, pointwise = problem_of(sizes, Operation.FORWARD, last, "float32"), algorithm("pointwise")
    assert not fuses_normalization(pointwise, problem.with_operation(Operation.BACKWARD_DATA))
    assert not fuses_normalization(algorithm("implicit-gemm"), problem)
    call = Call(problem, 2)
    with pytest.raises(InvalidInputError, match="number of channels with means"):
        call.run(pointwise, [2], prologue=random_prologue(problem.c - 1, None))
    with pytest.raises(InvalidInputError, match="weight must be"):
        call.run(pointwise, [2], prologue=Prologue(torch.zeros(37), torch.ones(37), torch.ones(36)))
    workspace = pointwise.workspace(problem, 2)
    unprepared = pointwise.bound(problem, 2, [slice(0, 2)], workspace)
    assert unprepared is not None
    operands = call.x.data_ptr(), call.w.data_ptr(), call.y.data_ptr(), None
    buffers = (call.memory.buffer(size).data_ptr() for size in (workspace.prepared_bytes, workspace.scratch_bytes))
    with pytest.raises(InvalidInputError, match="number of channels with means"):
        unprepared(*operands, *buffers, None, random_prologue(problem.c, None))
