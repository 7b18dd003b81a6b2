"""The compiled algorithms beside Winograd, each a folder of C++: what they take, their buffers, and their calls.

All but the loop nest pack the filter into prepared memory, and sum up its gradient there. Their entries in C++ have the
same names, behind the algorithm's own, and the same parameters (common/stage.h). They exist compiled alone, on the CPU.
Half precision is widened where windows and pixels are copied, and rounded where results are written; all between is in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mucudnn.kernels.compiled.library import (
    bias_span,
    bound_stage,
    element_number,
    epilogue_argument,
    geometry,
    library,
    loaded_build,
    operand,
    operation_number,
    shape_of,
    span,
    why_not,
    why_too_large,
)
from mucudnn.kernels.contract.algorithm import Algorithm, BoundStage, Workspace
from mucudnn.kernels.contract.base import BaseAlgorithm
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

_LEAST_CHANNELS = 4  # of a group of pointwise: fewer leave most of a register tile empty
_MOST_CHANNELS = 8  # of a group of depthwise; more are a matrix product
_LARGEST_EXTENT = 128  # of a filter of depthwise: windows of that many rows and more leave the cache


class PackedFilterAlgorithm(BaseAlgorithm):
    """Runs the entries ``mucudnn_<entry>_...`` of the compiled library.

    adds_to_filter: whether some sums of dw are made in dw itself, which ``accumulate`` then takes, too.
    """

    __slots__ = ()
    entry: ClassVar[str]
    adds_to_filter: ClassVar[bool] = False

    def is_local(self, problem: ConvProblem) -> bool:
        return True

    def fuses(self, problem: ConvProblem) -> bool:
        return True

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return problem.flops(micro_batch_size)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return 0

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            prepared.zero_()
            return
        self._function("pack_filter")(
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
            self._function("accumulate")(
                shape,
                of_x,
                of_y,
                *((byref(operand(problem, w)),) if self.adds_to_filter else ()),
                *span(prepared),
                *span(scratch),
                torch.get_num_threads(),
            )
            return
        backward = problem.operation is Operation.BACKWARD_DATA
        self._function("forward")(
            shape,
            backward,
            of_y if backward else of_x,
            *span(prepared),
            *bias_span(problem, bias),
            of_x if backward else of_y,
            *span(scratch),
            torch.get_num_threads(),
            epilogue_argument(problem, epilogue),
        )

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if problem.operation is Operation.BACKWARD_FILTER:
            self._function("add_filter_gradient")(
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
        return bound_stage(self.entry, problem, batch_size, slices, workspace, is_open=is_open)

    def _function(self, part: str) -> Callable[..., int]:
        function: Callable[..., int] = getattr(library(), f"mucudnn_{self.entry}_{part}")
        return function


@dataclass(frozen=True, slots=True)
class ImplicitGemm(PackedFilterAlgorithm):
    """Implicit GEMM: one matrix product over all taps and channels with no im2col matrix (implicit_gemm.cpp).

    The im2col matrix of ``gemm`` is never written: register tiles read it from small packed windows of the image. Any
    stride, padding, dilation and groups.
    """

    entry: ClassVar[str] = "implicit_gemm"
    name: str = "implicit-gemm"
    version: int = 2
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return why_not(problem) or why_too_large(problem)

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


@dataclass(frozen=True, slots=True)
class Pointwise(PackedFilterAlgorithm):
    """Pointwise: 1x1 convolutions as matrix products on the activations as they lie in memory (pointwise.cpp).

    No activation is transposed in either memory format. Strides and groups, but no padding.

    In float32 the first of its threads adds to dw itself, the others to copies.
    """

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


@dataclass(frozen=True, slots=True)
class Depthwise(PackedFilterAlgorithm):
    """Depthwise convolution, and small groups, by direct sums (depthwise.cpp).

    Every output is a sum over one channel, or the few of its group: register tiles of outputs read neighbouring columns
    from windows with zeros around them, or neighbouring channels where they lie. Any filter size, stride, padding,
    dilation and channel multiplier.
    """

    entry: ClassVar[str] = "depthwise"
    name: str = "depthwise"
    version: int = 3
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return why_not(problem) or why_too_large(problem) or _why_not_direct(problem)

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


@dataclass(frozen=True, slots=True)
class LoopNest(BaseAlgorithm):
    """Convolution as its definition has it: seven loops, direct sums, no buffer (loop_nest.cpp).

    It takes every problem and needs no workspace, so that any limit on it can be kept. Where another algorithm fits,
    that is mostly faster. Sums are in float32, those of float64 and of any filter's gradient in float64.
    """

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


PACKED: tuple[Algorithm, ...] = (ImplicitGemm(), Pointwise(), Depthwise())
LOOP_NEST: Algorithm = LoopNest()
