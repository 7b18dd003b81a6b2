"""Implicit GEMM: one matrix product over all taps and channels with no im2col matrix (compiled/implicit_gemm.cpp).

The im2col matrix of ``gemm`` is never written: register tiles read it from small packed windows of the image. Any
stride, padding, dilation and groups; it exists only compiled, on the CPU. Half precision is widened where windows are
packed and rounded where results are written; all between is in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from mucudnn.kernels.compiled.library import (
    HALF_TOO,
    bias_span,
    bound_stage,
    geometry,
    library,
    operand,
    span,
    why_not,
    why_too_large,
)
from mucudnn.kernels.contract.algorithm import BoundStage, Workspace
from mucudnn.kernels.contract.base import BaseAlgorithm
from mucudnn.words.problem import ConvProblem, Operation


@dataclass(frozen=True, slots=True)
class ImplicitGemm(BaseAlgorithm):
    """See the module's docstring."""

    name: str = "implicit-gemm"
    version: int = 2
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return why_not(problem, HALF_TOO) or why_too_large(problem)

    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        shape = byref(geometry(problem))
        c, k = problem.c // problem.groups, problem.k // problem.groups
        rows, lanes = (k, c) if problem.operation is Operation.BACKWARD_DATA else (c, k)
        prepared = library().mucudnn_implicit_gemm_prepared_bytes(shape, rows, lanes)
        if problem.operation is Operation.BACKWARD_FILTER:
            scratch = library().mucudnn_implicit_gemm_gradient_scratch_bytes(
                shape, micro_batch_size, c, k, problem.p, problem.q, torch.get_num_threads()
            )
        else:
            backward = problem.operation is Operation.BACKWARD_DATA
            target = (problem.h, problem.w) if backward else (problem.p, problem.q)
            scratch = library().mucudnn_implicit_gemm_scratch_bytes(
                shape, backward, micro_batch_size, rows, lanes, *target, torch.get_num_threads()
            )
        return Workspace(prepared, scratch)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            prepared.zero_()
            return
        library().mucudnn_implicit_gemm_pack_filter(
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
    ) -> None:
        shape, of_x, of_y = byref(geometry(problem)), byref(operand(problem, x)), byref(operand(problem, y))
        if problem.operation is Operation.BACKWARD_FILTER:
            library().mucudnn_implicit_gemm_accumulate(
                shape,
                of_x,
                of_y,
                *span(prepared),
                *span(scratch),
                torch.get_num_threads(),
            )
            return
        backward = problem.operation is Operation.BACKWARD_DATA
        library().mucudnn_implicit_gemm_forward(
            shape,
            backward,
            of_y if backward else of_x,
            *span(prepared),
            *bias_span(problem, bias),
            of_x if backward else of_y,
            *span(scratch),
            torch.get_num_threads(),
        )

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            library().mucudnn_implicit_gemm_add_filter_gradient(
                byref(geometry(problem)),
                *span(prepared),
                byref(operand(problem, w)),
                torch.get_num_threads(),
            )

    def bound(
        self, problem: ConvProblem, batch_size: int, slices: Sequence[slice], workspace: Workspace
    ) -> BoundStage | None:
        return bound_stage("implicit_gemm", problem, batch_size, slices, workspace)


ALGORITHMS: tuple[ImplicitGemm, ...] = (ImplicitGemm(),)
