"""Convolution as its definition has it: seven loops, direct sums, no buffer (loop_nest.cpp).

It takes every problem and needs no workspace, so that any limit on it can be kept. Where another algorithm fits, that
is mostly faster. Sums are in float32, those of float64 and of any filter's gradient in float64. It exists only
compiled, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from mucudnn.kernels.compiled.library import (
    bias_span,
    bound_stage,
    geometry,
    library,
    loaded_build,
    operand,
    why_too_large,
)
from mucudnn.kernels.contract.algorithm import BoundStage, Workspace
from mucudnn.kernels.contract.base import BaseAlgorithm
from mucudnn.words.problem import ConvProblem, Operation


@dataclass(frozen=True, slots=True)
class LoopNest(BaseAlgorithm):
    """See the module's docstring."""

    name: str = "loop-nest"
    version: int = 1
    deterministic: bool = True

    @property
    def is_last_resort(self) -> bool:
        return True

    def supports(self, problem: ConvProblem) -> str | None:
        return loaded_build().why_not_compiled or why_too_large(problem)

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        if problem.operation is Operation.BACKWARD_FILTER and problem.item_bytes < 4:
            return f"without a buffer the sum of slices would be rounded to {problem.dtype} after each: undivided only"
        return None

    def can_run_undivided(self, problem: ConvProblem) -> bool:
        return True

    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        shape, threads = byref(geometry(problem)), torch.get_num_threads()
        of_x, of_w, of_y = (byref(operand(problem, tensor)) for tensor in (x, w, y))
        if problem.operation is Operation.BACKWARD_FILTER:
            library().mucudnn_loop_nest_add_filter_gradient(shape, of_x, of_y, of_w, threads)
            return
        backward = problem.operation is Operation.BACKWARD_DATA
        of_in, of_out = (of_y, of_x) if backward else (of_x, of_y)
        of_bias = bias_span(problem, bias)
        library().mucudnn_loop_nest_forward(shape, backward, of_in, of_w, *of_bias, of_out, threads)

    def bound(
        self,
        problem: ConvProblem,
        batch_size: int,
        slices: Sequence[slice],
        workspace: Workspace,
        *,
        is_open: bool = False,
    ) -> BoundStage | None:
        return bound_stage("loop_nest", problem, batch_size, slices, workspace, is_open=is_open)


ALGORITHMS: tuple[LoopNest, ...] = (LoopNest(),)
