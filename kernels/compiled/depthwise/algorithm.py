"""Depthwise convolution, and small groups, by direct sums (depthwise.cpp).

Every output is a sum over one channel, or the few of its group: register tiles of outputs read neighbouring columns
from windows with zeros around them, or neighbouring channels where they lie. Any filter size, stride, padding, dilation
and channel multiplier; it exists only compiled, on the CPU. Half precision is widened where windows and pixels are
copied, and rounded where results are written; all between is in float32.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from typing import ClassVar

import torch

from mucudnn.kernels.compiled.library import geometry, library, operation_number, shape_of, why_not, why_too_large
from mucudnn.kernels.compiled.packed_filter import PackedFilterAlgorithm
from mucudnn.kernels.contract.algorithm import Workspace
from mucudnn.words.problem import ConvProblem

_MOST_CHANNELS = 8  # of a group; more are a matrix product
_LARGEST_EXTENT = 128  # of a filter: windows of that many rows and more leave the cache


@dataclass(frozen=True, slots=True)
class Depthwise(PackedFilterAlgorithm):
    """See the module's docstring."""

    entry: ClassVar[str] = "depthwise"
    name: str = "depthwise"
    version: int = 3
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return why_not(problem) or why_too_large(problem) or _why_not_direct(problem)

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        of_problem, operation = byref(geometry(problem)), operation_number(problem)
        x, w, y = (
            byref(shape_of(problem, shape)) for shape in (problem.x_shape(1), problem.w_shape(), problem.y_shape(1))
        )
        prepared = library().mucudnn_depthwise_prepared_bytes(of_problem, operation, w)
        scratch = library().mucudnn_depthwise_scratch_bytes(of_problem, operation, x, y, torch.get_num_threads())
        return Workspace(prepared, scratch)


def _why_not_direct(problem: ConvProblem) -> str | None:
    channels = max(problem.c, problem.k) // problem.groups
    if problem.groups == 1 or channels > _MOST_CHANNELS:
        return (
            f"a group has up to {channels} channels, of {problem.groups} groups; "
            f"direct sums take 2 groups or more, of up to {_MOST_CHANNELS} channels"
        )
    extent = max(problem.dilation[0] * (problem.r - 1), problem.dilation[1] * (problem.s - 1)) + 1
    if extent > _LARGEST_EXTENT:
        return f"the filter extends over {extent} pixels; direct sums take up to {_LARGEST_EXTENT}"
    return None


ALGORITHMS: tuple[Depthwise, ...] = (Depthwise(),)
