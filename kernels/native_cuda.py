"""Torch's own convolution on a CUDA device: the baseline, undivided."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mucudnn.configuration import NATIVE
from mucudnn.kernels.algorithm import Workspace
from mucudnn.kernels.allocation import counted_internal_bytes
from mucudnn.kernels.torch_convolution import torch_convolution
from mucudnn.problem import ConvProblem, Operation


@dataclass(frozen=True, slots=True)
class NativeOnCuda:
    """As the user's settings have it (``torch.backends.cudnn``). Not yet run on a GPU."""

    name: str = NATIVE
    version: int = 1
    deterministic: bool = True  # where torch is told to be

    def supports(self, problem: ConvProblem) -> str | None:
        return None

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        return "on CUDA devices torch picks an algorithm for each batch size anew; slices run on cuDNN's engines"

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        return Workspace()

    def internal_bytes(self, problem: ConvProblem, micro_batch_size: int) -> int:
        return counted_internal_bytes(self, problem, micro_batch_size, "cuda")

    def open(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        pass

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
        geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
        computed = torch_convolution(problem.operation, x, w, y, bias, *geometry)
        match problem.operation:
            case Operation.FORWARD:
                y.copy_(computed)
            case Operation.BACKWARD_DATA:
                x.copy_(computed)
            case Operation.BACKWARD_FILTER:
                w.add_(computed)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        pass


NATIVE_ON_CUDA = NativeOnCuda()
