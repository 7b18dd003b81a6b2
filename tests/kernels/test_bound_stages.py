"""Bound stages (one call of C for ``open``, every ``step`` and ``close``), and the loop nest without workspace."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from support.compiled import algorithm
from torch import Tensor

from mucudnn.core.config import DEFAULT_MAX_RELATIVE_ERROR
from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.algorithm import Workspace
from mucudnn.kernels.compiled.algorithms import CompiledStage
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.kernels.memory import empty_activation, peak_allocated_bytes, torch_dtype
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.kernels.winograd.algorithms import Winograd
from mucudnn.measuring.candidates import find_candidates
from mucudnn.testing.checks import Call, threads
from mucudnn.testing.contract import random_problem

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")
NAMES = ("winograd-2x2", "winograd-6x6", "winograd-2x2-5x5", "winograd-4x4-stride2")
NAMES += ("implicit-gemm", "pointwise", "depthwise", "loop-nest")
SLICES = ((slice(0, 5),), (slice(0, 2), slice(2, 4), slice(4, 5)), (slice(3, 5), slice(0, 3)))


def problem_for(name: str, operation: Operation, memory_format: MemoryFormat, **changes: Any) -> ConvProblem:
    taps = 5 if "5x5" in name else 3
    sizes: dict[str, Any] = {"c": 6, "h": 9, "w": 8, "k": 10, "r": taps, "s": taps, "padding": (1, 2)} | changes
    if name.endswith("stride2"):
        sizes |= {"stride": (2, 2)}
    if name in ("implicit-gemm", "depthwise", "loop-nest"):
        sizes |= {"stride": (2, 1), "dilation": (1, 2)}
    if name == "pointwise":
        sizes |= {"c": 8, "r": 1, "s": 1, "padding": (0, 0), "stride": (2, 1)}
    return ConvProblem(operation, memory_format=memory_format, **sizes)


def largest_workspace(name: str, problem: ConvProblem, slices: tuple[slice, ...]) -> Workspace:
    every = [algorithm(name).workspace(problem, each.stop - each.start) for each in slices]
    return Workspace(max(w.prepared_bytes for w in every), max(w.scratch_bytes for w in every))


@pytest.mark.parametrize("name", NAMES)
def test_one_call_is_open_every_step_and_close(name: str) -> None:
    kinds = [(1, "float32"), (2, "float32"), (2, "bfloat16"), (1, "float16")]
    for operation, memory_format, (groups, dtype) in product(Operation, MemoryFormat, kinds):
        problem = problem_for(name, operation, memory_format, groups=groups, dtype=dtype)
        is_divisible = algorithm(name).supports_micro_batch(problem, 1) is None
        for slices in SLICES if is_divisible else SLICES[:1]:
            assert torch.equal(in_parts(name, problem, slices), bound(name, problem, slices)), (problem, slices)


def in_parts(name: str, problem: ConvProblem, slices: tuple[slice, ...]) -> Tensor:
    """Return what open, every step and close compute."""
    chosen: Any = algorithm(name)
    call, prepared, scratch, bias = operands_of(name, problem, slices)
    chosen.open(problem, call.w, prepared)
    for each in slices:
        chosen.step(problem, call.x[each], call.w, call.y[each], bias, prepared, scratch)
    chosen.close(problem, call.w, prepared)
    assert call.memory.trespass() is None
    return call.written


def bound(name: str, problem: ConvProblem, slices: tuple[slice, ...]) -> Tensor:
    """Return what one bound call computes."""
    chosen, workspace = algorithm(name), largest_workspace(name, problem, slices)
    call, prepared, scratch, bias = operands_of(name, problem, slices)
    stage = chosen.bound(problem, 5, slices, workspace)
    assert stage is not None
    addresses = [None if t is None else t.data_ptr() for t in (call.x, call.w, call.y, bias, prepared, scratch)]
    stage(*addresses)
    assert call.memory.trespass() is None
    return call.written


def operands_of(
    name: str, problem: ConvProblem, slices: tuple[slice, ...]
) -> tuple[Call, Tensor, Tensor, Tensor | None]:
    """Make the call, both buffers and a bias: the same each time, with a result of zeros."""
    torch.manual_seed(0)
    bias = torch.randn(problem.k).to(torch_dtype(problem)) if problem.operation is Operation.FORWARD else None
    workspace, call = largest_workspace(name, problem, slices), Call(problem, 5)
    prepared, scratch = (call.memory.buffer(n) for n in (workspace.prepared_bytes, workspace.scratch_bytes))
    call.written.zero_()
    return call, prepared, scratch, bias


def run(stage: CompiledStage, problem: ConvProblem, n: int) -> list[Tensor]:
    """Call it on tensors full of ones, and buffers that are large enough. Returns all of them."""
    shapes = problem.x_shape(n), problem.w_shape(), problem.y_shape(n)
    tensors = [torch.ones(shape) for shape in shapes] + [torch.ones(2**16) for _ in range(2)]
    x, w, y, prepared, scratch = (t.data_ptr() for t in tensors)
    stage(x, w, y, None, prepared, scratch)
    return tensors


@pytest.mark.parametrize("name", ["winograd-4x4", "implicit-gemm", "pointwise", "depthwise"])
def test_what_does_not_belong_together_is_refused(name: str) -> None:
    torch.set_num_threads(2)  # with one thread, some need no buffer
    taps, whole = (1 if name == "pointwise" else 3), (slice(0, 2),)
    for operation, (slices, prepared, scratch, message) in product(
        Operation,
        [
            ((slice(0, 3),), 0, 0, "the number of samples of a slice is 3; allowed is 1 to 2"),
            ((slice(1, 1),), 0, 0, "the number of samples of a slice is 0"),
            ((slice(2, 3),), 0, 0, "the first sample of a slice is 2; allowed is 0 to 1"),
            ((slice(-1, 1),), 0, 0, "the first sample of a slice is -1"),
            (whole, -4, 0, "prepared holds"),
            (whole, 0, -4, "scratch holds"),
        ],
    ):
        problem = ConvProblem(operation, 4, 8, 8, 4, taps, taps, padding=(taps // 2, taps // 2))
        declared = algorithm(name).workspace(problem, 2)
        workspace = Workspace(declared.prepared_bytes + prepared, declared.scratch_bytes + scratch)
        with pytest.raises(InvalidInputError, match=message):
            run(algorithm(name).bound(problem, 2, slices, workspace), problem, 2)


def test_a_tile_that_is_not_compiled_is_refused() -> None:
    algorithm("winograd-4x4")  # or this build has none
    problem = ConvProblem(Operation.FORWARD, 4, 8, 8, 4, 3, 3, padding=(1, 1))
    for tile, message in ((3, r"F\(3x3, 3x3\) with .* is not among the compiled ones"), (0, "outputs of a tile is 0")):
        with pytest.raises(InvalidInputError, match=message):
            run(Winograd(tile, 3).bound(problem, 2, (slice(0, 2),), Workspace(2**18, 2**18)), problem, 2)


# The loop nest: every problem, no byte of workspace, and calls that do not belong together.


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
