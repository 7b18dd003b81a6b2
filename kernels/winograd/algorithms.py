"""Winograd convolution F(m x m, r x r): fewer multiplications than the direct method (Lavin and Gray 2016).

Images are divided into overlapping tiles. Tiles and filter are transformed, and each of the a x a points becomes a
matrix product over channels. With unit stride, a = m + r - 1, and there are (m r)^2 / a^2 times fewer multiplications.
With a stride, the filter is the sum of its phases (every stride-th element, each phase with unit stride on its own
pixels), and a = stride * (m - 1) + r. The filter is transformed once per call. BACKWARD_DATA uses the filter rotated by
180 degrees; BACKWARD_FILTER sums the transformed gradient over all micro-batches, and transforms it back once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from torch import Tensor

from mucudnn.kernels.compiled.library import why_not, why_too_large
from mucudnn.kernels.compiled.stages import Entries
from mucudnn.kernels.contract.algorithm import BaseAlgorithm, BoundStage, Workspace
from mucudnn.kernels.contract.allocation import counted_internal_bytes
from mucudnn.kernels.contract.epilogue import Epilogue
from mucudnn.kernels.winograd.cook_toom import CookToom, cook_toom
from mucudnn.kernels.winograd.tiling import tiling
from mucudnn.kernels.winograd.torch_backend import TorchWinograd
from mucudnn.words.problem import ConvProblem, Operation


class WinogradBackend(Protocol):
    """An implementation of Winograd's arithmetic, with its own layout of the buffers ``prepared`` and ``scratch``.

    For BACKWARD_FILTER, a zero-filled ``prepared`` must represent a gradient of zero. Tensors have the shapes that
    ``Algorithm`` describes.
    """

    def workspace(self, matrices: CookToom, problem: ConvProblem, n: int) -> Workspace:
        """Return the sizes of the buffers ``prepared`` and ``scratch`` for micro-batches of ``n`` samples."""

    def transform_filter(self, matrices: CookToom, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Write the transformed filter, which ``correlate`` needs in FORWARD and BACKWARD_DATA, to ``prepared``."""

    def correlate(
        self,
        matrices: CookToom,
        problem: ConvProblem,
        source: Tensor,
        target: Tensor,
        bias: Tensor | None,
        prepared: Tensor,
        scratch: Tensor,
    ) -> None:
        """Compute y from x and the bias in FORWARD, or dx from dy in BACKWARD_DATA."""

    def accumulate(
        self, matrices: CookToom, problem: ConvProblem, x: Tensor, y: Tensor, prepared: Tensor, scratch: Tensor
    ) -> None:
        """Add a micro-batch's contribution to the transformed gradient in ``prepared``, for BACKWARD_FILTER."""

    def fold(self, matrices: CookToom, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        """Transform the gradient in ``prepared`` back, and add it to ``w``, for BACKWARD_FILTER."""


_IN_TORCH = TorchWinograd()


@cache
def on_cuda() -> WinogradBackend:
    """Return the CUDA backend: mucudnn's own CUDA code, or torch's operators if that code cannot be compiled."""
    from mucudnn.kernels.winograd.cuda_backend import CudaWinograd

    ours = CudaWinograd()
    return _IN_TORCH if ours.launcher.why_not() else ours


@dataclass(frozen=True, slots=True)
class Winograd(BaseAlgorithm):
    """Winograd convolution F(m x m, r x r) with r x r filters, equal strides in both dimensions, and unit dilation.

    Any padding and any number of groups are supported.
    """

    m: int
    r: int
    stride: int = 1
    device_type: str = "cpu"
    version: int = 4
    deterministic: bool = True

    @property
    def name(self) -> str:
        of_filter = "" if self.r == 3 else f"-{self.r}x{self.r}"
        of_stride = "" if self.stride == 1 else f"-stride{self.stride}"
        return f"winograd-{self.m}x{self.m}{of_filter}{of_stride}"

    @property
    def matrices(self) -> CookToom:
        return cook_toom(self.m, self.r, self.stride)

    def supports(self, problem: ConvProblem) -> str | None:
        if (problem.r, problem.s) != (self.r, self.r):
            return f"the filter is {problem.r}x{problem.s}; {self.name} is for {self.r}x{self.r}"
        if problem.stride != (self.stride, self.stride):
            stride = f"{problem.stride[0]}x{problem.stride[1]}"
            return f"the stride is {stride}; {self.name} is for {self.stride}x{self.stride}"
        if problem.dilation != (1, 1):
            return f"the dilation is {problem.dilation[0]}x{problem.dilation[1]}; Winograd needs 1x1"
        return why_too_large(problem) if self.device_type == "cpu" else None

    def least_flops(self, problem: ConvProblem, micro_batch_size: int) -> int:
        """Return the FLOPs of the products of all tiles, without the transforms (Lavin and Gray 2016, section 4)."""
        tiles = tiling(self.matrices, problem, micro_batch_size)
        return 2 * tiles.count * self.matrices.a**2 * tiles.groups * tiles.source_channels * tiles.target_channels

    @property
    def entries(self) -> Entries:
        return Entries("winograd", self.m)

    def is_compiled(self, problem: ConvProblem) -> bool:
        """Return whether compiled/winograd/winograd.cpp computes the problem, instead of torch operators or CUDA."""
        return self.device_type == "cpu" and why_not(problem, self.entries.name) is None

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        if self.is_compiled(problem):
            return self.entries.workspace(problem, micro_batch_size)
        return self._backend.workspace(self.matrices, problem, micro_batch_size)

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        if self.device_type == "cpu":
            return 0
        return counted_internal_bytes(self, problem, micro_batch_size, self.device_type)  # cuBLAS's workspace

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if self.is_compiled(problem):
            self.entries.open(problem, w, prepared)
        elif problem.operation is Operation.BACKWARD_FILTER:
            prepared.zero_()
        else:
            self._backend.transform_filter(self.matrices, problem, w, prepared)

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
        if self.is_compiled(problem):
            self.entries.step(problem, x, w, y, bias, prepared, scratch, epilogue)
            return
        backend = self._backend
        match problem.operation:
            case Operation.FORWARD:
                backend.correlate(self.matrices, problem, x, y, bias, prepared, scratch)
            case Operation.BACKWARD_DATA:
                backend.correlate(self.matrices, problem, y, x, None, prepared, scratch)
            case Operation.BACKWARD_FILTER:
                backend.accumulate(self.matrices, problem, x, y, prepared, scratch)

    def fuses(self, problem: ConvProblem) -> bool:
        return self.is_compiled(problem)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        if self.is_compiled(problem):
            self.entries.close(problem, w, prepared)
        elif problem.operation is Operation.BACKWARD_FILTER:
            self._backend.fold(self.matrices, problem, w, prepared)

    def bound(
        self,
        problem: ConvProblem,
        batch_size: int,
        slices: Sequence[slice],
        workspace: Workspace,
    ) -> BoundStage | None:
        if not self.is_compiled(problem):
            return None
        return self.entries.bound(problem, batch_size, slices, workspace)

    def band(
        self, problem: ConvProblem, n: int, rows: tuple[int, int], above: int
    ) -> tuple[BoundStage, Workspace] | None:
        is_strided_data = self.stride > 1 and problem.operation is Operation.BACKWARD_DATA  # its tiles begin elsewhere
        if is_strided_data or not self.is_compiled(problem):
            return None
        return self.entries.band(problem, n, rows, above)

    @property
    def _backend(self) -> WinogradBackend:
        """Return the backend that computes problems without C++ code."""
        return on_cuda() if self.device_type == "cuda" else _IN_TORCH


_UNIT_STRIDE = (Winograd(2, 3, version=5), Winograd(4, 3), Winograd(6, 3), Winograd(2, 5), Winograd(4, 5))
_STRIDED = (Winograd(2, 3, 2), Winograd(4, 3, 2), Winograd(4, 5, 2))
ALGORITHMS: tuple[Winograd, ...] = (*_UNIT_STRIDE, *_STRIDED)
ON_CUDA: tuple[Winograd, ...] = tuple(replace(algorithm, device_type="cuda") for algorithm in _UNIT_STRIDE)
