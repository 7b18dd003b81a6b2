"""The mathematics of Winograd convolution: tiles, edges, errors, sums in the transform domain."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from support.problems.winograd_backend import awkward_geometries

from mucudnn.kernels.compiled.library import build_name
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.winograd import algorithms as winograd
from mucudnn.kernels.winograd.algorithms import ALGORITHMS, Winograd
from mucudnn.kernels.winograd.cook_toom import cook_toom
from mucudnn.kernels.winograd.tiling import tiling
from mucudnn.kernels.winograd.torch_backend import TorchWinograd
from mucudnn.testing.guarded_call import Call
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation, Pair

ROUNDING = 1e-13  # of float64, for the largest tiles
by_name = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
by_operation = pytest.mark.parametrize("operation", list(Operation))


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic in torch, also where another backend would be preferred."""
    monkeypatch.setattr(winograd, "why_not", lambda problem: "torch alone")


def problem_for(algorithm: Winograd, operation: Operation, size: Pair, **changes: object) -> ConvProblem:
    stride = (algorithm.stride, algorithm.stride)
    arguments = {"c": 3, "k": 4, "dtype": "float64", "stride": stride} | changes
    return ConvProblem(operation, h=size[0], w=size[1], r=algorithm.r, s=algorithm.r, **arguments)  # type: ignore[arg-type]


def error_of(algorithm: Winograd, problem: ConvProblem, micro_batches: tuple[int, ...] = (1,)) -> float:
    call = Call(problem, sum(micro_batches))
    expected = reference(problem, call.x, call.w, call.y)
    return relative_l2_error(call.run(algorithm, micro_batches), expected)


@by_name
@by_operation
@pytest.mark.parametrize("memory_format", list(MemoryFormat))
def test_every_awkward_geometry(algorithm: Winograd, operation: Operation, memory_format: MemoryFormat) -> None:
    for geometry in awkward_geometries(algorithm.m, algorithm.r, algorithm.stride):
        problem = ConvProblem(operation, **geometry, memory_format=memory_format)
        assert error_of(algorithm, problem, (2, 1)) < ROUNDING, problem


@by_operation
def test_error_grows_with_the_tile_and_stays_bounded(operation: Operation) -> None:
    """float32, 256 channels. The bars of the defaults are 1e-5."""
    errors = []
    for algorithm in (Winograd(2, 3), Winograd(4, 3), Winograd(6, 3)):
        problem = problem_for(algorithm, operation, (12, 12), c=256, k=256, padding=(1, 1), dtype="float32")
        errors.append(error_of(algorithm, problem))
    assert errors == sorted(errors)
    assert errors[0] < 1e-6
    assert errors[1] < 2.5e-6
    assert errors[2] < 1e-5


@pytest.mark.skipif(build_name() == "torch", reason="the compiled algorithms are not available")
@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA])
def test_the_error_of_the_largest_tile_does_not_grow_with_the_channels(operation: Operation) -> None:
    """One sum over 512 channels would have 2.4 times the error of one over 64."""
    few, many = (
        error_of(Winograd(6, 3), problem_for(Winograd(6, 3), operation, (12, 12), c=c, k=c, dtype="float32"))
        for c in (64, 512)
    )
    assert many < 1.3 * few


@pytest.mark.usefixtures("torch_only")
def test_the_points_are_more_accurate_than_the_customary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = Winograd(4, 3)
    problem = problem_for(algorithm, Operation.FORWARD, (12, 12), c=256, k=32, padding=(1, 1), dtype="float32")
    ours = error_of(algorithm, problem)
    customary = cook_toom(4, 3, points=tuple(Fraction(p) for p in (0, 1, -1, 2, -2)))
    monkeypatch.setattr(Winograd, "matrices", customary)
    assert 1.5 * ours < error_of(algorithm, problem)


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize("operation", [Operation.FORWARD, Operation.BACKWARD_DATA])
def test_the_filter_is_transformed_once_a_call(operation: Operation, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = Winograd(4, 3)
    calls = []
    transform = TorchWinograd.transform_filter
    monkeypatch.setattr(TorchWinograd, "transform_filter", lambda *args: (calls.append(args), transform(*args)))
    assert error_of(algorithm, problem_for(algorithm, operation, (9, 9)), (2, 2, 1)) < ROUNDING
    assert len(calls) == 1


@pytest.mark.usefixtures("torch_only")
@by_name
@by_operation
def test_half_precision_is_float32_rounded_once(algorithm: Winograd, operation: Operation) -> None:
    arguments = {"c": 8, "k": 8, "padding": (1, 1)}
    half = Call(problem_for(algorithm, operation, (9, 9), dtype="bfloat16", **arguments), 2)
    full = Call(problem_for(algorithm, operation, (9, 9), dtype="float32", **arguments), 2)
    for wide, narrow in ((full.x, half.x), (full.w, half.w), (full.y, half.y)):
        wide.copy_(narrow)
    expected = full.run(algorithm, [1, 1]).bfloat16()
    assert torch.equal(half.run(algorithm, [1, 1]), expected)


@pytest.mark.parametrize(("operation", "padding", "top"), [("forward", 1, 1), ("backward_data", 5, -3)])
def test_tiles_cover_the_target(operation: str, padding: int, top: int) -> None:
    problem = ConvProblem(Operation(operation), 6, 10, 9, 4, 3, 3, padding=(padding, padding), groups=2)
    tiles = tiling(cook_toom(4, 3), problem, 5)
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
    arguments = {"c": 3, "h": 9, "w": 9, "k": 4, "r": 3, "s": 3} | changes
    assert Winograd(4, 3).supports(ConvProblem(Operation.FORWARD, **arguments)) == reason  # type: ignore[arg-type]


def test_names_are_the_published_ones() -> None:
    names = ["winograd-2x2", "winograd-4x4", "winograd-6x6", "winograd-2x2-5x5", "winograd-4x4-5x5"]
    names += ["winograd-2x2-stride2", "winograd-4x4-stride2", "winograd-4x4-5x5-stride2"]
    assert [a.name for a in ALGORITHMS] == names
