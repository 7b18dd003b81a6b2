"""Torch's own convolution on micro-batches, in the tensors' memory format or in the other one.

The backend that torch's dispatcher picks depends on N (float32 maps of at most 20480 elements go to oneDNN for two
samples, but to im2col for one). A slice must not change what is computed, so oneDNN's forward is called by name. Its
backward operators have no name of their own: there a micro-batch is allowed if torch picks for it what it picks for
``_LARGE_BATCH`` samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mucudnn.configuration import NATIVE
from mucudnn.kernels.algorithm import Workspace
from mucudnn.kernels.allocation import counted_internal_bytes
from mucudnn.kernels.buffers import Part, carve, carved_bytes, torch_dtype
from mucudnn.problem import ConvProblem, MemoryFormat, Operation

_LARGE_BATCH = 64  # beyond every threshold on N in torch's choice of a backend
_ONEDNN = "Mkldnn"


@dataclass(frozen=True, slots=True)
class Native:
    """Torch's convolution; ``other_format`` converts operands to the other memory format and the result back."""

    name: str
    other_format: bool = False
    version: int = 1
    deterministic: bool = True

    def supports(self, problem: ConvProblem) -> str | None:
        return None

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        usual = _backend(problem, _LARGE_BATCH)
        if problem.operation is Operation.FORWARD and usual == _ONEDNN:
            return None
        picked = _backend(problem, micro_batch_size)
        if picked == usual:
            return None
        return (
            f"for {micro_batch_size} sample(s) torch computes {problem.operation} with its backend {picked} "
            f"instead of {usual}, and that backend cannot be asked for by name"
        )

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        scratch = self._scratch_parts(problem, micro_batch_size)
        return Workspace(carved_bytes(self._prepared_parts(problem)), carved_bytes(scratch))

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return counted_internal_bytes(self, problem, micro_batch_size)

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        filters, accumulators = self._split_prepared(problem, prepared)
        if problem.operation is Operation.BACKWARD_FILTER:
            for accumulator in accumulators:
                accumulator.zero_()
        else:
            for converted in filters:
                converted.copy_(w)

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
        filters, accumulators = self._split_prepared(problem, prepared)
        x_in, w_in, y_in = x, *(filters or [w]), y
        if self.other_format:
            x_in, y_in = self._converted(problem, x, y, scratch)
        match problem.operation:
            case Operation.FORWARD:
                y.copy_(_forward(problem, x_in, w_in, bias))
            case Operation.BACKWARD_DATA:
                x.copy_(_backward(problem, x_in, w_in, y_in))
            case Operation.BACKWARD_FILTER:
                (accumulators or [w])[0].add_(_backward(problem, x_in, w_in, y_in))

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        for accumulator in self._split_prepared(problem, prepared)[1]:
            w.add_(accumulator)

    def _prepared_parts(self, problem: ConvProblem) -> list[Part]:
        """The converted filter, then the accumulator of micro-batches that torch returns in less than float32."""
        parts = [_other_part(problem, problem.w_shape())] if self.other_format else []
        if problem.operation is Operation.BACKWARD_FILTER and problem.item_bytes < 4:
            parts.append(Part(problem.w_shape(), torch.float32))
        return parts

    def _split_prepared(self, problem: ConvProblem, prepared: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        views = carve(prepared, self._prepared_parts(problem))
        filters = [_as_other(problem, view) for view in views[: int(self.other_format)]]
        return filters, views[int(self.other_format) :]

    def _scratch_parts(self, problem: ConvProblem, n: int) -> list[Part]:
        if not self.other_format:
            return []
        shapes = [problem.x_shape(n), problem.y_shape(n)]
        used = shapes[:1] if problem.operation is Operation.FORWARD else shapes
        return [_other_part(problem, shape) for shape in used]

    def _converted(self, problem: ConvProblem, x: Tensor, y: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        """The operands in the other format. dx stays unwritten: torch takes its shape and format from it, no values."""
        parts = self._scratch_parts(problem, x.shape[0])
        x_in, *rest = (_as_other(problem, view) for view in carve(scratch, parts))
        if problem.operation is not Operation.BACKWARD_DATA:
            x_in.copy_(x)
        for y_in in rest:
            y_in.copy_(y)
        return x_in, rest[0] if rest else y


NATIVE_ALGORITHM = Native(NATIVE)
NATIVE_OTHER_FORMAT = Native("native-other-format", other_format=True)


def _other_part(problem: ConvProblem, shape: tuple[int, int, int, int]) -> Part:
    """A 4-D tensor as it lies in memory in the format that is not the problem's."""
    n, c, h, w = shape
    if problem.memory_format is MemoryFormat.CONTIGUOUS:
        shape = (n, h, w, c)
    return Part(shape, torch_dtype(problem))


def _as_other(problem: ConvProblem, stored: Tensor) -> Tensor:
    return stored.permute(0, 3, 1, 2) if problem.memory_format is MemoryFormat.CONTIGUOUS else stored


def _forward(problem: ConvProblem, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    stride, padding, dilation, groups = problem.stride, problem.padding, problem.dilation, problem.groups
    y: Tensor
    if _backend(problem, _LARGE_BATCH) == _ONEDNN:
        y = torch.ops.aten.mkldnn_convolution(x, w, bias, padding, stride, dilation, groups)
    else:
        y = torch.ops.aten.convolution(x, w, bias, stride, padding, dilation, False, (0, 0), groups)
    return y


def _backward(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """dx or dw; torch reads nothing but the shape of the operand whose gradient is asked for."""
    data = problem.operation is Operation.BACKWARD_DATA
    geometry = (problem.stride, problem.padding, problem.dilation, False, (0, 0), problem.groups)
    dx, dw, _ = torch.ops.aten.convolution_backward(y, x, w, None, *geometry, (data, not data, False))
    result: Tensor = dx if data else dw
    return result


def _backend(problem: ConvProblem, n: int) -> str:
    """Name of the backend that torch's dispatcher picks on the CPU for ``n`` samples."""
    return _backend_on(problem, n, torch.get_num_threads())


@lru_cache(maxsize=4096)
def _backend_on(problem: ConvProblem, n: int, _threads: int) -> str:
    element = torch.empty((), dtype=torch_dtype(problem))  # the choice looks at shapes: nothing is allocated for it
    x, w = element.expand(problem.x_shape(n)), element.expand(problem.w_shape())
    geometry = (problem.stride, problem.padding, problem.dilation, False, (0, 0), problem.groups)
    backend = torch._C._select_conv_backend(x, w, None, *geometry)
    return str(backend.name)
