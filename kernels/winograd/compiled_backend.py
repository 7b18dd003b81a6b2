"""Winograd convolution in C++ (compiled/winograd/winograd.cpp): on the CPU, in either memory format.

Tiles are transformed, multiplied and transformed back block by block in the cores' caches, so that the scratch is a few
blocks, whatever the micro-batch is. Half precision is widened where it is read and rounded where it is written; all
between is in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

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
)
from mucudnn.kernels.contract.algorithm import BoundStage, Workspace
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.kernels.winograd.cook_toom import CookToom
from mucudnn.words.problem import ConvProblem, Operation


class CompiledWinograd:
    """The arithmetic of ``Winograd``; see ``WinogradBackend`` there for the shapes."""

    def supports(self, problem: ConvProblem) -> str | None:
        return why_not(problem)

    def workspace(self, matrices: CookToom, problem: ConvProblem, n: int) -> Workspace:
        shape, c, k = byref(geometry(problem)), problem.c // problem.groups, problem.k // problem.groups
        channels, target = (c, k), (problem.p, problem.q)
        if problem.operation is Operation.BACKWARD_DATA:
            channels, target = (k, c), (problem.h, problem.w)
        operation, threads = operation_number(problem), torch.get_num_threads()
        return Workspace(
            library().mucudnn_winograd_prepared_bytes(shape, matrices.m, *channels),
            library().mucudnn_winograd_scratch_bytes(shape, matrices.m, operation, n, *channels, *target, threads),
        )

    def transform_filter(self, matrices: CookToom, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        library().mucudnn_winograd_transform_filter(
            byref(geometry(problem)),
            matrices.m,
            problem.operation is Operation.BACKWARD_DATA,
            byref(operand(problem, w)),
            *span(prepared),
            torch.get_num_threads(),
        )

    def correlate(
        self,
        matrices: CookToom,
        problem: ConvProblem,
        source: Tensor,
        target: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
        epilogue: Epilogue | None = None,
    ) -> None:
        """Compute what every backend does, and the epilogue of y."""
        library().mucudnn_winograd_forward(
            byref(geometry(problem)),
            matrices.m,
            problem.operation is Operation.BACKWARD_DATA,
            byref(operand(problem, source)),
            *span(prepared),
            *bias_span(problem, bias),
            byref(operand(problem, target)),
            *span(scratch),
            torch.get_num_threads(),
            epilogue_argument(problem, epilogue),
        )

    def accumulate(
        self, matrices: CookToom, problem: ConvProblem, x: Tensor, y: Tensor, prepared: Tensor, scratch: Tensor
    ) -> None:
        library().mucudnn_winograd_accumulate(
            byref(geometry(problem)),
            matrices.m,
            byref(operand(problem, x)),
            byref(operand(problem, y)),
            *span(prepared),
            *span(scratch),
            torch.get_num_threads(),
        )

    def fold(self, matrices: CookToom, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        library().mucudnn_winograd_add_filter_gradient(
            byref(geometry(problem)),
            matrices.m,
            *span(prepared),
            byref(operand(problem, w)),
            torch.get_num_threads(),
        )

    def bound(
        self,
        matrices: CookToom,
        problem: ConvProblem,
        batch_size: int,
        slices: Sequence[slice],
        workspace: Workspace,
        *,
        is_open: bool,
    ) -> BoundStage:
        return bound_stage("winograd", problem, batch_size, slices, workspace, is_open=is_open, tile=matrices.m)
