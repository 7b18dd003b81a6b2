"""The moments of y as an epilogue: counts, means and squared deviations of its channels, for batch norm in training."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from support.compiled import algorithm
from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.kernels.algorithm import Epilogue, fuses_moments, zero_moments
from mucudnn.kernels.compiled.library import loaded_build
from mucudnn.testing.checks import Call, threads

pytestmark = pytest.mark.skipif(loaded_build().library is None, reason="nothing is compiled")

EPS = 1e-5
# Sizes of problems for each algorithm: groups, strides, odd sizes, and tiles that channels or pixels do not fill.
SIZES: dict[str, list[dict[str, Any]]] = {
    "pointwise": [
        {"c": 16, "h": 20, "w": 17, "k": 80},
        {"c": 300, "h": 13, "w": 9, "k": 40},
        {"c": 12, "h": 23, "w": 22, "k": 46, "groups": 2, "stride": (2, 1)},
    ],
    "depthwise": [
        {"c": 32, "h": 15, "w": 13, "k": 32, "r": 3, "s": 3, "padding": (1, 1), "groups": 32},
        {"c": 37, "h": 19, "w": 18, "k": 74, "r": 5, "s": 5, "padding": (2, 2), "groups": 37, "stride": (2, 2)},
    ],
    "implicit-gemm": [
        {"c": 3, "h": 31, "w": 29, "k": 24, "r": 3, "s": 3, "stride": (2, 2), "padding": (1, 1)},
        {"c": 40, "h": 5, "w": 131, "k": 34, "r": 3, "s": 2, "groups": 2, "dilation": (1, 2)},
    ],
    "winograd-2x2": [{"c": 20, "h": 15, "w": 18, "k": 40, "r": 3, "s": 3, "padding": (1, 1)}],
    "winograd-6x6": [{"c": 6, "h": 21, "w": 50, "k": 38, "r": 3, "s": 3, "groups": 2}],
    "winograd-4x4-stride2": [{"c": 8, "h": 31, "w": 26, "k": 33, "r": 3, "s": 3, "stride": (2, 2), "padding": (1, 0)}],
}


def problem_of(sizes: dict[str, Any], dtype: str = "float32") -> ConvProblem:
    return ConvProblem(
        Operation.FORWARD, dtype=dtype, memory_format=MemoryFormat.CHANNELS_LAST, **({"r": 1, "s": 1} | sizes)
    )


def moments_of(call: Call, name: str, micro_batches: list[int], offset: float = 0) -> Tensor:
    """Return counts, means and squared deviations, (3, K), of the call's y. offset: of the bias."""
    bias = (torch.linspace(-1, 1, call.problem.k) + offset).to(call.y.dtype)
    moments = zero_moments(call.problem.k)
    call.run(algorithm(name), micro_batches, bias, Epilogue(moments=moments))
    return moments[0, :3, : call.problem.k]


@pytest.mark.parametrize("name", SIZES)
def test_moments_are_as_exact_as_those_of_batch_norm_in_torch(name: str) -> None:
    cases = [("float32", 0), ("float32", 1000), ("bfloat16", 0), ("float16", 30)]
    for number, (sizes, (dtype, offset)) in enumerate((each, case) for each in SIZES[name] for case in cases):
        torch.manual_seed(number)
        call = Call(problem_of(sizes, dtype), 7)
        with threads(number % 4 + 1):
            counts, means, squares = moments_of(call, name, [3, 2, 2], offset)
            torchs = torch.native_batch_norm(call.y.float(), None, None, None, None, True, 0.1, EPS)[1:]
        y = call.y.double()
        assert (counts == y[:, 0].numel()).all()
        expected = y.mean((0, 2, 3)), (y.var((0, 2, 3), correction=0) + EPS).rsqrt()
        for ours, theirs, exact in zip((means, (squares / counts + EPS).rsqrt()), torchs, expected, strict=True):
            error, allowed = ((each.float() - exact).norm() / exact.norm() for each in (ours, theirs))
            assert error <= max(1.5 * allowed, torch.finfo().eps), (sizes, dtype, offset, float(error), float(allowed))


@pytest.mark.parametrize("name", ["pointwise", "depthwise", "implicit-gemm", "winograd-2x2"])
def test_the_same_bits_again_where_threads_take_tasks_as_they_are_free(name: str) -> None:
    """Without moments, tasks of images as large as these go to whichever thread is free."""
    taps = {"r": 3, "s": 3} if name != "pointwise" else {}
    groups = 64 if name == "depthwise" else 1
    call = Call(problem_of({"c": 64 if groups > 1 else 4, "h": 96, "w": 92, "k": 64, "groups": groups} | taps), 4)
    with threads(2):
        first, *others = (moments_of(call, name, [4]) for _ in range(6))
    assert all(torch.equal(first, other) for other in others)


def test_a_first_pixel_far_from_the_others_costs_no_digits() -> None:
    call = Call(problem_of({"c": 4, "h": 40, "w": 40, "k": 32}), 4)
    call.w.fill_(1)
    call.x.add_(100)
    call.x[0, :, 0, 0] = 0
    counts, means, squares = moments_of(call, "pointwise", [4])
    variance = call.y.double().var((0, 2, 3), correction=0)
    assert ((squares / counts) / variance - 1).abs().max() < 1e-6
    assert torch.allclose(means, call.y.double().mean((0, 2, 3)), rtol=1e-7)


def test_stages_of_several_algorithms_add_to_the_same_moments() -> None:
    problem = problem_of({"c": 8, "h": 9, "w": 10, "k": 24, "r": 3, "s": 3})
    call, moments, bias = Call(problem, 5), zero_moments(problem.k), torch.zeros(problem.k)
    parts = []
    for name, first, count in zip(("implicit-gemm", "winograd-2x2"), accumulate([0, 2]), (2, 3), strict=True):
        part = Call(problem, count)
        part.x.copy_(call.x[first : first + count])
        part.w.copy_(call.w)
        parts.append(part.run(algorithm(name), [count], bias, Epilogue(moments=moments)))
    y = torch.cat(parts).double()
    counts, means, squares = moments[0, :3, : problem.k]
    assert (counts == y[:, 0].numel()).all()
    assert torch.allclose(means, y.mean((0, 2, 3)), rtol=0, atol=1e-6)
    assert torch.allclose(squares / counts, y.var((0, 2, 3), correction=0), rtol=1e-6)


def test_moments_are_of_y_after_addition_and_activation() -> None:
    for name in ("pointwise", "depthwise"):
        call, moments = Call(problem_of(SIZES[name][0]), 3), zero_moments(SIZES[name][0]["k"])
        call.run(algorithm(name), [3], None, Epilogue("ReLU", torch.randn_like(call.y), moments))
        assert torch.allclose(moments[0, 1, : call.problem.k], call.y.double().mean((0, 2, 3)), rtol=1e-6)


def test_what_cannot_hold_moments_is_refused() -> None:
    problem = problem_of({"c": 8, "h": 9, "w": 10, "k": 24})
    call, pointwise = Call(problem, 2), algorithm("pointwise")
    with pytest.raises(InvalidInputError, match="moments holds"):
        call.run(pointwise, [2], None, Epilogue(moments=zero_moments(problem.k)[1:]))
    contiguous = ConvProblem(Operation.FORWARD, c=8, h=9, w=10, k=24, r=1, s=1)
    assert not fuses_moments(pointwise, contiguous)
    with pytest.raises(InvalidInputError, match="the channels of y are last"):
        Call(contiguous, 2).run(pointwise, [2], None, Epilogue(moments=zero_moments(24)))
