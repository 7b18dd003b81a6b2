"""Binds recipes of compiled algorithms: all that does not change from call to call is resolved once.

A call is then one Python function and one call of C for each algorithm: what a convolution of some microseconds costs
is otherwise mostly what surrounds it (views of slices, descriptions of tensors, conversions of arguments).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Self

import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import BoundStage
from mucudnn.kernels.contract.buffers import TORCH_FORMATS
from mucudnn.running.workspace import is_advised, on_huge_pages, workspace_of
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class BoundRecipe:
    """A recipe on the CPU. stages: each with where its prepared bytes begin in the workspace; scratch: where that does.

    new: makes the result, uninitialised.
    """

    stages: tuple[tuple[BoundStage, int], ...]
    scratch: int
    workspace_bytes: int
    keeps_workspace: bool
    new: Callable[[], Tensor]
    is_channels_last: bool
    compute: Callable[[BoundRecipe, Tensor, Tensor, Tensor | None], Tensor]

    @classmethod
    def of(
        cls,
        problem: ConvProblem,
        batch_size: int,
        stages: Sequence[tuple[BoundStage, int]],
        scratch: slice,
        keeps_workspace: bool,
    ) -> Self:
        """Bind a recipe for mini-batches of this size."""
        shape = _written_shape(problem, batch_size)
        dtype: torch.dtype = getattr(torch, problem.dtype)
        is_channels_last = problem.memory_format is MemoryFormat.CHANNELS_LAST
        strides = _strides(shape, is_channels_last)
        new = partial(torch.empty_strided, shape, strides, dtype=dtype, device=_CPU)
        if is_advised(prod(shape) * dtype.itemsize):
            new = partial(_new_on_huge_pages, new)
        compute = _COMPUTES[problem.operation]
        return cls(tuple(stages), scratch.start, scratch.stop, keeps_workspace, new, is_channels_last, compute)

    def run(self, x: Tensor, w: Tensor, third: Tensor | None) -> Tensor:
        """Compute what the operation writes, newly allocated. third: the bias or None in FORWARD; else dy.

        The tensors have the shapes of problem and batch size, and values in memory. Raises what torch raises for lack
        of memory.
        """
        return self.compute(self, x, w, third)

    def dense(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or a copy, dense in the memory format."""
        return tensor.contiguous(memory_format=torch.channels_last) if self.is_channels_last else tensor.contiguous()

    def execute(self, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None) -> None:
        """Run every stage on dense tensors."""
        workspace = workspace_of(self.workspace_bytes, _CPU, self.keeps_workspace)
        start = workspace.data_ptr()
        addresses = x.data_ptr(), w.data_ptr(), y.data_ptr(), None if bias is None else bias.data_ptr()
        for stage, prepared in self.stages:
            stage(*addresses, start + prepared, start + self.scratch)


def _forward(recipe: BoundRecipe, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    y = recipe.new()
    recipe.execute(recipe.dense(x), recipe.dense(w), y, None if bias is None else bias.contiguous())
    return y


def _backward_data(recipe: BoundRecipe, x: Tensor, w: Tensor, dy: Tensor | None) -> Tensor:
    assert dy is not None
    dx = recipe.new()
    recipe.execute(dx, recipe.dense(w), recipe.dense(dy), None)
    return dx


def _backward_filter(recipe: BoundRecipe, x: Tensor, w: Tensor, dy: Tensor | None) -> Tensor:
    assert dy is not None
    dw = recipe.new().zero_()
    recipe.execute(recipe.dense(x), dw, recipe.dense(dy), None)
    return dw


_COMPUTES: dict[Operation, Callable[[BoundRecipe, Tensor, Tensor, Tensor | None], Tensor]] = {
    Operation.FORWARD: _forward,
    Operation.BACKWARD_DATA: _backward_data,
    Operation.BACKWARD_FILTER: _backward_filter,
}


def _new_on_huge_pages(new: Callable[[], Tensor]) -> Tensor:
    return on_huge_pages(new())


def _written_shape(problem: ConvProblem, batch_size: int) -> tuple[int, int, int, int]:
    match problem.operation:
        case Operation.FORWARD:
            return problem.y_shape(batch_size)
        case Operation.BACKWARD_DATA:
            return problem.x_shape(batch_size)
        case Operation.BACKWARD_FILTER:
            return problem.w_shape()


def _strides(shape: tuple[int, int, int, int], is_channels_last: bool) -> tuple[int, int, int, int]:
    """Return the strides that torch gives a new tensor."""
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c) if is_channels_last else (c * h * w, h * w, w, 1)
