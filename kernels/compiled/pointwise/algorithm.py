"""Pointwise: 1x1 convolutions as matrix products on the activations as they lie in memory (pointwise.cpp).

No activation is transposed in either memory format. Strides and groups, but no padding; compiled, float32, CPU.
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
    epilogue_argument,
    geometry,
    library,
    operand,
    operation_number,
    span,
    why_not,
    why_too_large,
)
from mucudnn.kernels.contract.algorithm import BoundStage, Workspace
from mucudnn.kernels.contract.base import BaseAlgorithm
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

_LEAST_CHANNELS = 4  # of a group: fewer leave most of a register tile empty


@dataclass(frozen=True, slots=True)
class Pointwise(BaseAlgorithm):
    """See the module's docstring."""

    name: str = "pointwise"
    version: int = 1
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        if (problem.r, problem.s) != (1, 1):
            return f"the filter is {problem.r}x{problem.s}; pointwise takes 1x1"
        if problem.padding != (0, 0):
            return f"the padding is {problem.padding}; pointwise takes none"
        channels = min(problem.c, problem.k) // problem.groups
        if problem.groups > 1 and channels < _LEAST_CHANNELS:
            return f"a group has {channels} channels; pointwise takes groups of {_LEAST_CHANNELS} and more"
        return why_not(problem) or why_too_large(problem)

    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)

    def fuses(self, problem: ConvProblem) -> bool:
        return True

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        shape, operation = byref(geometry(problem)), operation_number(problem)
        c, k = problem.c // problem.groups, problem.k // problem.groups
        channels_last = problem.memory_format is MemoryFormat.CHANNELS_LAST
        threads = torch.get_num_threads()
        return Workspace(
            library().mucudnn_pointwise_prepared_bytes(shape, operation, c, k, threads),
            library().mucudnn_pointwise_scratch_bytes(
                shape, operation, channels_last, micro_batch_size, c, k, problem.h, problem.w, threads
            ),
        )

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            prepared.zero_()
            return
        library().mucudnn_pointwise_pack_filter(
            byref(geometry(problem)),
            problem.operation is Operation.BACKWARD_DATA,
            byref(operand(problem, w)),
            *span(prepared),
            torch.get_num_threads(),
        )

    def step(
        self,
        problem: ConvProblem,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
        epilogue: Epilogue | None = None,
    ) -> None:
        shape, of_x, of_y = byref(geometry(problem)), byref(operand(problem, x)), byref(operand(problem, y))
        if problem.operation is Operation.BACKWARD_FILTER:
            library().mucudnn_pointwise_accumulate(
                shape,
                of_x,
                of_y,
                byref(operand(problem, w)),
                *span(prepared),
                *span(scratch),
                torch.get_num_threads(),
            )
            return
        library().mucudnn_pointwise_multiply(
            shape,
            problem.operation is Operation.BACKWARD_DATA,
            of_x,
            *span(prepared),
            *bias_span(problem, bias),
            of_y,
            *span(scratch),
            torch.get_num_threads(),
            epilogue_argument(problem, epilogue),
        )

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            library().mucudnn_pointwise_add_copies(
                byref(geometry(problem)),
                *span(prepared),
                byref(operand(problem, w)),
                torch.get_num_threads(),
            )

    def bound(
        self,
        problem: ConvProblem,
        batch_size: int,
        slices: Sequence[slice],
        workspace: Workspace,
        *,
        is_open: bool = False,
    ) -> BoundStage | None:
        return bound_stage("pointwise", problem, batch_size, slices, workspace, is_open=is_open)


ALGORITHMS: tuple[Pointwise, ...] = (Pointwise(),)
