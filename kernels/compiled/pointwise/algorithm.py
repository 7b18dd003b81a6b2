"""Pointwise: 1x1 convolutions as matrix products on the activations as they lie in memory (pointwise.cpp).

No activation is transposed in either memory format. Strides and groups, but no padding; compiled, CPU. Half
precision is widened where pixels are copied and rounded where results are written; all between is in float32.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import ClassVar

import torch

from mucudnn.kernels.compiled.library import (
    element_number,
    geometry,
    library,
    operation_number,
    why_not,
    why_too_large,
)
from mucudnn.kernels.compiled.packed_filter import PackedFilterAlgorithm
from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.words.problem import ConvProblem, MemoryFormat

_LEAST_CHANNELS = 4  # of a group: fewer leave most of a register tile empty


@dataclass(frozen=True, slots=True)
class Pointwise(PackedFilterAlgorithm):
    """See the module's docstring. In float32 the first of its threads adds to dw itself, the others to copies."""

    entry: ClassVar[str] = "pointwise"
    adds_to_filter: ClassVar[bool] = True
    name: str = "pointwise"
    version: int = 2
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

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        shape, operation, element = byref(geometry(problem)), operation_number(problem), element_number(problem)
        c, k = problem.c // problem.groups, problem.k // problem.groups
        channels_last = problem.memory_format is MemoryFormat.CHANNELS_LAST
        threads = torch.get_num_threads()
        return Workspace(
            library().mucudnn_pointwise_prepared_bytes(shape, operation, element, c, k, threads),
            library().mucudnn_pointwise_scratch_bytes(
                shape, operation, element, channels_last, micro_batch_size, c, k, problem.h, problem.w, threads
            ),
        )


ALGORITHMS: tuple[Pointwise, ...] = (Pointwise(),)
