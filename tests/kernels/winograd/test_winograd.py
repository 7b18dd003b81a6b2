"""Winograd convolution: Cook and Toom's matrices, tiles, edges, errors, sums in the transform domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.half_precision import assert_half_is_float32_rounded_once
from support.problems.winograd_backend import awkward_geometries

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation, Pair
from mucudnn.kernels.compiled.library import bfloat16_products, why_not
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.kernels.winograd.algorithms import ALGORITHMS, Winograd, tiling
from mucudnn.kernels.winograd.cuda import CookToom, Matrix, cook_toom
from mucudnn.testing.checks import Call

ROUNDING = 1e-5  # of float32
PROBLEM = ConvProblem(Operation.FORWARD, 3, 9, 9, 4, 3, 3)
compiled = pytest.mark.skipif(why_not(PROBLEM, "winograd") is not None, reason="this build has no Winograd")
by_name = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
by_operation = pytest.mark.parametrize("operation", list(Operation))


def problem_for(algorithm: Winograd, operation: Operation, size: Pair, **changes: object) -> ConvProblem:
    stride = (algorithm.stride, algorithm.stride)
    arguments = {"c": 3, "k": 4, "stride": stride} | changes
    return ConvProblem(operation, h=size[0], w=size[1], r=algorithm.r, s=algorithm.r, **arguments)  # type: ignore[arg-type]


def error_of(algorithm: Winograd, problem: ConvProblem, micro_batches: tuple[int, ...] = (1,)) -> float:
    call = Call(problem, sum(micro_batches))
    expected = reference(problem, call.x, call.w, call.y)
    return relative_l2_error(call.run(algorithm, micro_batches), expected)


@compiled
@by_name
@by_operation
@pytest.mark.parametrize("memory_format", list(MemoryFormat))
def test_every_awkward_geometry(algorithm: Winograd, operation: Operation, memory_format: MemoryFormat) -> None:
    for geometry in awkward_geometries(algorithm.m, algorithm.r, algorithm.stride):
        problem = ConvProblem(operation, **geometry, memory_format=memory_format)
        assert error_of(algorithm, problem, (2, 1)) < ROUNDING, problem


@compiled
@by_operation
def test_error_grows_with_the_tile_and_stays_bounded(operation: Operation) -> None:
    """float32, 256 channels. The bars of the defaults are 1e-5."""
    errors = []
    for algorithm in (Winograd(2, 3), Winograd(4, 3), Winograd(6, 3)):
        problem = problem_for(algorithm, operation, (12, 12), c=256, k=256, padding=(1, 1))
        errors.append(error_of(algorithm, problem))
    assert errors == sorted(errors)
    assert errors[0] < 1e-6
    assert errors[1] < 2.5e-6
    assert errors[2] < 1e-5


@compiled
@by_name
@by_operation
def test_half_precision_is_float32_rounded_once(algorithm: Winograd, operation: Operation) -> None:
    problem = problem_for(algorithm, operation, (9, 9), dtype="bfloat16", c=8, k=8, padding=(1, 1))
    if algorithm.name == "winograd-2x2" and bfloat16_products() != "floats":  # its transforms are rounded to bfloat16
        assert error_of(algorithm, problem) < 2**-7
        return
    assert_half_is_float32_rounded_once(algorithm, problem, [1, 1])


@pytest.mark.parametrize(("operation", "padding", "top"), [("forward", 1, 1), ("backward_data", 5, -3)])
def test_tiles_cover_the_target(operation: str, padding: int, top: int) -> None:
    problem = ConvProblem(Operation(operation), 6, 10, 9, 4, 3, 3, padding=(padding, padding), groups=2)
    tiles = tiling(4, problem, 5)
    assert tiles.padding == (top, top)
    assert (tiles.rows, tiles.columns, tiles.count) == (3, 3, 45)
    channels = (3, 2) if operation == "forward" else (2, 3)
    assert (tiles.source_channels, tiles.target_channels) == channels


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"r": 5, "s": 5}, "the filter is 5x5; winograd-4x4 is for 3x3"),
        ({"r": 3, "s": 1}, "the filter is 3x1; winograd-4x4 is for 3x3"),
        ({"stride": (1, 2)}, "the stride is 1x2; winograd-4x4 is for 1x1"),
        ({"dilation": (2, 1)}, "the dilation is 2x1; Winograd needs 1x1"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, object], reason: str) -> None:
    assert Winograd(4, 3).supports(replace(PROBLEM, **changes)) == reason  # type: ignore[arg-type]


# The matrices in exact fractions: they compute a correlation, with the structure that fast transforms rely on.


USED = [(2, 3), (4, 3), (6, 3), (2, 5), (4, 5)]
NUMBERS = st.fractions(min_value=-8, max_value=8, max_denominator=16)


def times(matrix: Matrix, vector: Sequence[Fraction]) -> list[Fraction]:
    return [sum((x * y for x, y in zip(row, vector, strict=True)), Fraction(0)) for row in matrix]


def filtered(f: CookToom, d: Sequence[Fraction], g: Sequence[Fraction]) -> list[Fraction]:
    products = [x * y for x, y in zip(times(f.g, g), times(f.b_t, d), strict=True)]
    return times(f.a_t, products)


@pytest.mark.parametrize(("m", "r"), USED)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_it_is_the_correlation(m: int, r: int, data: st.DataObject) -> None:
    f = cook_toom(m, r)
    d = data.draw(st.lists(NUMBERS, min_size=f.a, max_size=f.a))
    g = data.draw(st.lists(NUMBERS, min_size=r, max_size=r))
    assert filtered(f, d, g) == [sum(d[i + j] * g[j] for j in range(r)) for i in range(m)]
