"""Common to the compiled algorithms that pack the filter into prepared memory, and sum up its gradient there.

Their entries in C++ have the same names, behind the algorithm's own, and the same parameters (common/stage.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import byref
from typing import ClassVar

import torch
from torch import Tensor

from mucudnn.kernels.compiled.library import (
    bias_span,
    bound_stage,
    epilogue_argument,
    geometry,
    library,
    operand,
    span,
)
from mucudnn.kernels.contract.algorithm import BoundStage, Workspace
from mucudnn.kernels.contract.base import BaseAlgorithm
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.words.problem import ConvProblem, Operation


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
