"""Half precision beside float32, of the algorithms that sum it in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.algorithm import Algorithm, Epilogue, fuses
from mucudnn.kernels.compiled.library import bfloat16_products
from mucudnn.testing.checks import Call


def assert_half_is_float32_rounded_once(
    algorithm: Algorithm, problem: ConvProblem, micro_batches: Sequence[int], same_order: bool = True
) -> None:
    """Compare bits, in forward also with a bias and an epilogue, if it fuses one. problem: of half precision.

    If bfloat16 is multiplied in pairs, or the algorithm does not add in the same order in both, few results may be
    rounded to a neighbour.
    """
    half = Call(problem, sum(micro_batches))
    full = Call(replace(problem, dtype="float32"), sum(micro_batches))
    for wide, narrow in ((full.x, half.x), (full.w, half.w), (full.y, half.y)):
        wide.copy_(narrow)

    def assert_equal(rounded: Tensor, expected: Tensor) -> None:
        if not same_order or (problem.dtype == "bfloat16" and bfloat16_products() != "floats"):
            assert_rounded(rounded, expected, equal=0.99 if same_order else 0.95)
        else:
            assert torch.equal(rounded, expected.to(rounded.dtype))

    assert_equal(half.run(algorithm, micro_batches), full.run(algorithm, micro_batches))
    if problem.operation is Operation.FORWARD:
        bias = half.memory.vector(problem, problem.k).normal_()
        if not fuses(algorithm, problem):
            assert_equal(half.run(algorithm, micro_batches, bias), full.run(algorithm, micro_batches, bias.float()))
            return
        added = half.memory.tensor(problem, problem.y_shape(half.batch_size)).normal_()
        assert_equal(
            half.run(algorithm, micro_batches, bias, Epilogue("SiLU", added)),
            full.run(algorithm, micro_batches, bias.float(), Epilogue("SiLU", added.float())),
        )


def assert_rounded(rounded: Tensor, expected: Tensor, equal: float = 0.99) -> None:
    """Require that each element is the rounding of a number within float32's error of the expected one.

    equal: the share of elements that are the rounding of the expected one itself.
    """
    scale = expected.abs().max()
    error = (rounded.double() - expected.double()).abs()
    assert (error <= torch.finfo(rounded.dtype).eps / 2 * expected.abs() + 1e-5 * scale).all()
    assert (rounded == expected.to(rounded.dtype)).double().mean() > equal
