"""Half precision beside float32, of the algorithms that compute it in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import Algorithm, fuses
from mucudnn.kernels.contract.buffers import torch_dtype
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.testing.guarded_call import Call
from mucudnn.words.problem import ConvProblem, Operation


def assert_half_is_float32_rounded_once(
    algorithm: Algorithm, problem: ConvProblem, micro_batches: Sequence[int]
) -> None:
    """Compare bits, in forward also with a bias and an epilogue, if it fuses one. problem: of half precision."""
    half = Call(problem, sum(micro_batches))
    full = Call(replace(problem, dtype="float32"), sum(micro_batches))
    for wide, narrow in ((full.x, half.x), (full.w, half.w), (full.y, half.y)):
        wide.copy_(narrow)

    def assert_equal(
        bias: Tensor | None = None, epilogue: Epilogue | None = None, wide: Epilogue | None = None
    ) -> None:
        expected = full.run(algorithm, micro_batches, None if bias is None else bias.float(), wide)
        assert torch.equal(half.run(algorithm, micro_batches, bias, epilogue), expected.to(torch_dtype(problem)))

    assert_equal()
    if problem.operation is Operation.FORWARD:
        bias = half.memory.vector(problem, problem.k).normal_()
        added = half.memory.tensor(problem, problem.y_shape(half.batch_size)).normal_()
        both = (Epilogue("SiLU", added), Epilogue("SiLU", added.float())) if fuses(algorithm, problem) else ()
        assert_equal(bias, *both)
