"""The machine's bound of a convolution, against sums by hand; kinds of layers."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from mucudnn.bench.results.bounds import MachineLimits, kind_of_layer
from mucudnn.core.problem import ConvProblem, Operation

FORWARD, BACKWARD_DATA = Operation.FORWARD, Operation.BACKWARD_DATA


def problem(c: int, k: int, r: int, operation: Operation = FORWARD, **other: Any) -> ConvProblem:
    return ConvProblem(operation, c, 8, 8, k, r, r, **other)


def test_the_slower_of_moving_and_computing_bounds() -> None:
    dense = problem(16, 32, 3, padding=1)
    moved = 4 * (2 * 16 * 64 + 32 * 16 * 9 + 2 * 32 * 64)
    products = 2 * (2 * 32 * 64 * 16 * 9)
    assert MachineLimits(bytes_per_s=100.0).bound_s(dense, 2) == moved / 100
    assert MachineLimits(flops_per_s=100.0).bound_s(dense, 2) == products / 100
    assert MachineLimits(100.0, 100.0).bound_s(dense, 2) == products / 100
    assert MachineLimits().bound_s(dense, 2) == 0


def test_the_cpu_has_limits_and_what_is_not_measured_has_none() -> None:
    for dtype in ("float64", "bfloat16"):
        here, elsewhere = MachineLimits.measured("cpu", dtype), MachineLimits.measured("cuda", dtype)
        assert here.are_known
        assert isfinite(here.flops_per_s + here.bytes_per_s)
        assert (elsewhere.flops_per_s, elsewhere.bytes_per_s) == (inf, inf)
        assert not elsewhere.are_known


def test_kinds_of_layers() -> None:
    kinds = {
        "pointwise": problem(16, 32, 1, stride=2),
        "depthwise": problem(16, 32, 3, groups=16),
        "grouped": problem(16, 32, 3, groups=8),
        "first layer": problem(3, 32, 3, stride=2),
        "strided": problem(16, 32, 3, stride=2),
        "5x5": problem(16, 32, 5),
    }
    assert {kind: kind_of_layer(one) for kind, one in kinds.items()} == {kind: kind for kind in kinds}
