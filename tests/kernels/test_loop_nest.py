"""The loop nest: every problem, no byte of workspace, and calls that do not belong together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.kernels.contract.allocation import peak_allocated_bytes
from mucudnn.kernels.contract.buffers import empty_activation, torch_dtype
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.registry import algorithm
from mucudnn.measuring.candidates import find_candidates
from mucudnn.testing.checks import threads
from mucudnn.testing.geometries import random_problem
from mucudnn.testing.guarded_call import Call
from mucudnn.words.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
LOOP_NEST = algorithm("loop-nest")


def tensors(problem: ConvProblem, n: int) -> dict[str, Tensor]:
    """Ones of the problem's sizes and memory format, and a bias in the forward operation."""
    shapes = {"x": problem.x_shape(n), "w": problem.w_shape(), "y": problem.y_shape(n)}
    made = {name: empty_activation(problem, shape).fill_(1) for name, shape in shapes.items()}
    has_bias = problem.operation is Operation.FORWARD
    return made | ({"bias": torch.ones(problem.k, dtype=torch_dtype(problem))} if has_bias else {})


def step(problem: ConvProblem, given: dict[str, Any]) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    LOOP_NEST.step(problem, given["x"], given["w"], given["y"], given.get("bias"), nothing, nothing)


def test_it_takes_every_problem_without_a_byte() -> None:
    random, taken = Random(0), 0
    while taken < 300:
        problem = random_problem(random)
        if problem is None:
            continue
        taken += 1
        assert LOOP_NEST.supports(problem) is None, problem
        assert LOOP_NEST.is_local(problem)
        for n in (1, 3, 10**9):
            assert LOOP_NEST.workspace(problem, n) == Workspace(0, 0)
            assert LOOP_NEST.internal_bytes(problem, n) == 0
        given = tensors(problem, 1)
        assert peak_allocated_bytes(lambda p=problem, g=given: step(p, g)) == 0, problem  # type: ignore[misc]


def test_long_rows_and_sums_are_exact_in_every_dtype_and_the_same_bits_by_any_number_of_threads() -> None:
    """Rows of more than one block of lanes, more filters and channels than one tile, strided and not."""
    sizes: list[dict[str, Any]] = [
        {"c": 9, "h": 3, "w": 290, "k": 10, "r": 1, "s": 1},
        {"c": 5, "h": 6, "w": 300, "k": 9, "r": 3, "s": 4, "stride": (2, 2), "padding": (1, 2)},
        {"c": 150, "h": 5, "w": 6, "k": 17, "r": 3, "s": 3, "padding": (1, 1), "dilation": (1, 2)},
        {"c": 2, "h": 90, "w": 80, "k": 3, "r": 2, "s": 2},
        {"c": 3, "h": 6, "w": 4, "k": 5, "r": 3, "s": 2, "stride": (100_000, 200_000), "padding": (1, 1)},
    ]
    every = product(sizes, Operation, MemoryFormat, DEFAULT_MAX_RELATIVE_ERROR)
    for of_problem, operation, memory_format, dtype in every:
        problem = ConvProblem(operation, **of_problem, memory_format=memory_format, dtype=dtype)
        call = Call(problem, 2)
        expected, results = reference(problem, call.x, call.w, call.y), []
        for count in (1, 3, 40):
            call.written.zero_()
            with threads(count):
                results.append(call.run(LOOP_NEST, [2]).clone())
        assert relative_l2_error(results[0], expected) < DEFAULT_MAX_RELATIVE_ERROR[dtype] / 4, problem
        assert all(torch.equal(results[0], other) for other in results), problem


def test_gradients_of_halves_are_offered_undivided_alone() -> None:
    """There is no buffer in which slices could be summed in float32."""
    for dtype, operation in product(DEFAULT_MAX_RELATIVE_ERROR, Operation):
        problem = ConvProblem(operation, 3, 6, 6, 4, 3, 3, dtype=dtype)
        candidates, _ = find_candidates(problem, [LOOP_NEST], [1, 2, 4])
        undivided = operation is Operation.BACKWARD_FILTER and dtype in ("bfloat16", "float16")
        assert [c.micro_batch_size for c in candidates] == ([4] if undivided else [1, 2, 4])


WRONG: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "samples": ("x", lambda t: t[1:], "the number of samples of y is 2"),
    "height": ("y", lambda t: torch.cat([t, t[:, :, :1]], 2), "the height of y is"),
    "width": ("x", lambda t: torch.cat([t, t[..., :1]], 3), "the width of y is"),
    "channels": ("x", lambda t: torch.cat([t, t], 1), "the number of channels of a filter is 3"),
    "filters": ("y", lambda t: torch.cat([t, t], 1), "the number of filters is 10"),
    "empty": ("x", lambda t: t[:0], "is 0; allowed is 1 to"),
    "expanded": ("x", lambda t: t[:1].expand(2, -1, -1, -1), "strides"),
    "format": ("y", lambda t: t.to(memory_format=torch.channels_last), "dense and contiguous"),
    "dtype": ("y", lambda t: t.half(), "has dtype torch.float16"),
    "filter height": ("w", lambda t: torch.cat([t, t], 2), "the height of the filter is 6"),
    "filter width": ("w", lambda t: torch.cat([t, t], 3), "the width of the filter is 6"),
    "bias": ("bias", lambda t: t[1:], "the bias holds"),
    "dtype of bias": ("bias", lambda t: t.half(), "the bias has dtype torch.float16"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_belong_together_is_refused_before_anything_is_written(what: str) -> None:
    name, change, message = WRONG[what]
    operations = [Operation.FORWARD] if "bias" in what else list(Operation)
    for operation, dtype in product(operations, ("float32", "float64")):
        problem = ConvProblem(operation, 6, 7, 8, 10, 3, 3, stride=(1, 1), padding=(1, 1), groups=2, dtype=dtype)
        given = tensors(problem, 2)
        given[name] = change(given[name])
        before = {key: t.clone() for key, t in given.items()}
        with pytest.raises(InvalidInputError, match=message):
            step(problem, given)
        assert all(torch.equal(t, before[key]) for key, t in given.items())
