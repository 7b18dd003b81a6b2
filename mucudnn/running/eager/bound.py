"""Binds executables of compiled algorithms: all that does not change from call to call is resolved once.

A call is then one Python function and one call of C for each algorithm: what a convolution of some microseconds costs
is otherwise mostly what surrounds it (views of slices, descriptions of tensors, conversions of arguments).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from mucudnn.kernels.contract.algorithm import BoundStage
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.running.eager.hot_path import Bound, bound_in_cpp
from mucudnn.running.workspace import is_advised, on_huge_pages, workspace_of
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation

BoundInPython = Callable[..., Tensor]
_Sizes = tuple[int, int, int, int]
_Result = tuple[_Sizes, _Sizes, torch.dtype, torch.device]  # shape and strides of what is written
_Execute = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Epilogue | None], None]
_Dense = Callable[[Tensor], Tensor]

_CPU = torch.device("cpu")


def bound_executable(
    problem: ConvProblem,
    batch_size: int,
    stages: Sequence[tuple[BoundStage, int | None]],
    scratch: slice,
    keeps_workspace: bool,
    fuses: bool,
) -> tuple[Bound, BoundInPython]:
    """Bind an executable on the CPU for mini-batches of this size: as fast as can be, and in Python.

    stages: each with where its prepared bytes begin in the workspace, ``None``: in a buffer of their own; scratch:
    where that lies, at the end. fuses: whether every stage takes an epilogue.

    Both take x, w, and the bias or None in FORWARD, else dy, of the problem's shapes, and return what the operation
    writes, newly allocated. In FORWARD the second also takes the buffer that was prepared in another call, or None, and
    an epilogue, or None. Raise what torch raises for lack of memory.
    """
    is_channels_last = problem.memory_format is MemoryFormat.CHANNELS_LAST
    execute = _execute(tuple(stages), scratch, keeps_workspace)
    dense: _Dense = _dense_channels_last if is_channels_last else Tensor.contiguous
    shape = _written_shape(problem, batch_size)
    dtype: torch.dtype = getattr(torch, problem.dtype)
    result = shape, _strides(shape, is_channels_last), dtype, _CPU
    is_large = is_advised(prod(shape) * dtype.itemsize)
    new = _new(result, is_large)
    in_python = _BINDINGS[problem.operation](new, dense, execute)
    if not keeps_workspace:
        return in_python, in_python
    new_large = new if is_large else None
    in_cpp = bound_in_cpp(problem.operation, stages, scratch, is_channels_last, fuses, result, new_large, in_python)
    return in_cpp, in_python


def _execute(stages: tuple[tuple[BoundStage, int | None], ...], scratch: slice, keeps_workspace: bool) -> _Execute:
    """Run every stage on dense tensors."""
    scratch_start, workspace_bytes = scratch.start, scratch.stop

    def execute(
        x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, kept: Tensor | None, epilogue: Epilogue | None
    ) -> None:
        workspace = workspace_of(workspace_bytes, _CPU, keeps_workspace)
        start = workspace.data_ptr()
        of_x, of_w, of_y, of_bias = x.data_ptr(), w.data_ptr(), y.data_ptr(), None if bias is None else bias.data_ptr()
        of_kept = 0 if kept is None else kept.data_ptr()
        for stage, prepared in stages:
            of_prepared = of_kept if prepared is None else start + prepared
            stage(of_x, of_w, of_y, of_bias, of_prepared, start + scratch_start, epilogue)

    return execute


def _forward(new: Callable[[], Tensor], dense: _Dense, execute: _Execute) -> BoundInPython:
    def run(
        x: Tensor, w: Tensor, bias: Tensor | None, kept: Tensor | None = None, epilogue: Epilogue | None = None
    ) -> Tensor:
        y = new()
        if epilogue is not None and epilogue.added is not None:
            epilogue = Epilogue(epilogue.activation, dense(epilogue.added))
        execute(dense(x), dense(w), y, None if bias is None else bias.contiguous(), kept, epilogue)
        return y

    return run


def _backward_data(new: Callable[[], Tensor], dense: _Dense, execute: _Execute) -> BoundInPython:
    def run(x: Tensor, w: Tensor, dy: Tensor | None) -> Tensor:
        assert dy is not None
        dx = new()
        execute(dx, dense(w), dense(dy), None, None, None)
        return dx

    return run


def _backward_filter(new: Callable[[], Tensor], dense: _Dense, execute: _Execute) -> BoundInPython:
    def run(x: Tensor, w: Tensor, dy: Tensor | None) -> Tensor:
        assert dy is not None
        dw = new().zero_()
        execute(dense(x), dw, dense(dy), None, None, None)
        return dw

    return run


_BINDINGS: dict[Operation, Callable[[Callable[[], Tensor], _Dense, _Execute], BoundInPython]] = {
    Operation.FORWARD: _forward,
    Operation.BACKWARD_DATA: _backward_data,
    Operation.BACKWARD_FILTER: _backward_filter,
}


def _dense_channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _new(result: _Result, is_large: bool) -> Callable[[], Tensor]:
    """Make the result, uninitialised."""
    shape, strides, dtype, device = result
    new = partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)
    return (lambda: on_huge_pages(new())) if is_large else new


def _written_shape(problem: ConvProblem, batch_size: int) -> _Sizes:
    match problem.operation:
        case Operation.FORWARD:
            return problem.y_shape(batch_size)
        case Operation.BACKWARD_DATA:
            return problem.x_shape(batch_size)
        case Operation.BACKWARD_FILTER:
            return problem.w_shape()


def _strides(shape: _Sizes, is_channels_last: bool) -> _Sizes:
    """Return the strides that torch gives a new tensor."""
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c) if is_channels_last else (c * h * w, h * w, w, 1)
