"""Implicit GEMM: one matrix product over all taps and channels with no im2col matrix (implicit_gemm.cpp).

The im2col matrix of ``gemm`` is never written: register tiles read it from small packed windows of the image. Any
stride, padding, dilation and groups; it exists only compiled, on the CPU. Half precision is widened where windows are
packed and rounded where results are written; all between is in float32.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import ClassVar

import torch

from mucudnn.kernels.compiled.library import geometry, library, why_not, why_too_large
from mucudnn.kernels.compiled.packed_filter import PackedFilterAlgorithm
from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.words.problem import ConvProblem, Operation


@dataclass(frozen=True, slots=True)
class ImplicitGemm(PackedFilterAlgorithm):
    """See the module's docstring."""

    entry: ClassVar[str] = "implicit_gemm"
    name: str = "implicit-gemm"
    version: int = 2
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return why_not(problem) or why_too_large(problem)

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


ALGORITHMS: tuple[ImplicitGemm, ...] = (ImplicitGemm(),)
