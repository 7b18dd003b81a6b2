"""The algorithms written entirely in C++, for the CPU; the C++ sources of each algorithm have a folder.

Half precision is widened when operands are packed, and rounded when results are written; the arithmetic is in float32.
Only ``implicit-gemm`` and ``pointwise`` multiply bfloat16 by the processor's instruction, if there is one
(common/pairs.h).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mucudnn.core.problem import ConvProblem, Operation
from mucudnn.kernels.compiled.library import loaded_build, why_not, why_too_large
from mucudnn.kernels.compiled.stages import Entries
from mucudnn.kernels.contract.algorithm import BaseAlgorithm

_LEAST_CHANNELS = 4  # Pointwise: with fewer channels per group, most of a register tile would be empty.
_MOST_CHANNELS = 8  # Depthwise: with more channels per group, matrix products are faster.
_LARGEST_EXTENT = 128  # Depthwise: the windows of larger filters do not fit in the cache.


@dataclass(frozen=True, slots=True)
class CompiledAlgorithm(Entries, BaseAlgorithm):
    """Base class of algorithms that are computed entirely by C++ functions."""

    name: str
    version: int = 1
    deterministic: bool = True

    @property
    def entry(self) -> str:
        return self.name.replace("-", "_")

    def supports(self, problem: ConvProblem) -> str | None:
        return why_not(problem, self.name)

    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def fuses(self, problem: ConvProblem) -> bool:
        return True

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0


class Pointwise(CompiledAlgorithm):
    """Convolution with 1x1 filters as matrix products on x and y in place, in either memory format (pointwise.cpp).

    Supports strides and groups, but no padding. For BACKWARD_FILTER in float32, the first thread adds to the filter
    gradient dw itself, the other threads to copies of dw.
    """

    __slots__ = ()

    def supports(self, problem: ConvProblem) -> str | None:
        if (problem.r, problem.s) != (1, 1):
            return f"the filter is {problem.r}x{problem.s}; pointwise takes 1x1"
        if problem.padding != (0, 0):
            return f"the padding is {problem.padding}; pointwise takes none"
        channels = min(problem.c, problem.k) // problem.groups
        if problem.groups > 1 and channels < _LEAST_CHANNELS:
            return f"a group has {channels} channels; pointwise takes groups of {_LEAST_CHANNELS} and more"
        return why_not(problem, self.name)


class Depthwise(CompiledAlgorithm):
    """Depthwise convolution, and convolution with small groups of channels, by direct sums (depthwise.cpp).

    Every output is a sum over the few channels of its group. Each register tile of outputs reads neighbouring columns
    from zero-padded windows, or neighbouring channels in place. Any stride, padding, dilation and channel multiplier
    are supported.
    """

    __slots__ = ()

    def supports(self, problem: ConvProblem) -> str | None:
        if reason := why_not(problem, self.name):
            return reason
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


class LoopNest(CompiledAlgorithm):
    """Convolution computed by its definition, as seven loops without any buffer (loop_nest.cpp).

    This algorithm supports every problem without workspace, so it meets any workspace limit. It is mostly slower than
    other algorithms. Sums are in float32; in float64 if the problem is in float64, and for all filter gradients.
    """

    __slots__ = ()

    @property
    def is_last_resort(self) -> bool:
        return True

    def supports(self, problem: ConvProblem) -> str | None:
        return loaded_build().why_not_compiled or why_too_large(problem)

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        if problem.operation is Operation.BACKWARD_FILTER and problem.item_bytes < 4:
            return f"sums over micro-batches would be rounded to {problem.dtype} after each; it only runs undivided"
        return None

    def can_run_undivided(self, problem: ConvProblem) -> bool:
        return True

    def fuses(self, problem: ConvProblem) -> bool:
        return False

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        pass

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        pass


# One matrix product over all taps and channels without an im2col matrix (implicit_gemm.cpp): register tiles read small
# packed windows of the image. Supports any stride, padding, dilation and groups.
IMPLICIT_GEMM = CompiledAlgorithm("implicit-gemm", version=3)
POINTWISE, DEPTHWISE = Pointwise("pointwise", version=3), Depthwise("depthwise", version=3)
LOOP_NEST = LoopNest("loop-nest")
ALGORITHMS = (IMPLICIT_GEMM, POINTWISE, DEPTHWISE)
