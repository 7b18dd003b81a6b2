"""Torch's own convolution on micro-batches, in the tensors' memory format or in the other one.

The backend that torch's dispatcher picks depends on N. On the CPU, for example, float32 maps of at most 20480 elements
go to oneDNN for two samples, but to im2col for one; on CUDA, depthwise convolutions in half precision go to cuDNN or to
one of torch's kernels. Slicing must not change the backend, so oneDNN's forward is called by name. Other operations
cannot be called by name: a micro-batch is then supported only if torch picks the same backend as for ``_LARGE_BATCH``
samples. On CUDA that is mostly cuDNN, which chooses one of its engines for each size.

cuDNN's forward writes into y; all other operations and backends allocate a result, which is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mucudnn.core.problem import ConvProblem, MemoryFormat, Operation
from mucudnn.core.torch_settings import TORCHS_OWN, TorchSettings
from mucudnn.kernels.algorithm import BaseAlgorithm, Workspace
from mucudnn.kernels.memory import Part, carve, carved_bytes, empty_activation, torch_dtype, torch_format
from mucudnn.kernels.torch_convolution import torch_convolution

_LARGE_BATCH = 64  # larger than all thresholds on N in torch's choice of a backend
_ONEDNN = "Mkldnn"
_CUDNN = "Cudnn"


def sees_only_padding(problem: ConvProblem) -> bool:
    """Return whether the padding is so wide that the filter can lie entirely in the padding.

    oneDNN 3.12 can crash on such problems, in channels_last and with a bias. This was observed on a map one pixel wide:
    16x13x1 -> 13, 3x3, stride 2x2, padding 3x9, dilation 1x2.
    """
    taps = zip(problem.padding, problem.dilation, problem.window, strict=True)
    return any(padding > dilation * (size - 1) for padding, dilation, size in taps)


@dataclass(frozen=True, slots=True)
class Native(BaseAlgorithm):
    """Torch's own convolution, in the tensors' memory format or, with ``other_format``, in the other memory format.

    other_format: convert operands to that format and the result back.
    by_name: call oneDNN's forward by name; otherwise torch's dispatcher picks the backend, as in a user's step.
    """

    name: str
    other_format: bool = False
    device_type: str = "cpu"
    version: int = 1
    by_name: bool = True

    is_torchs_own = True
    takes_volumes = True

    def is_foreign(self, problem: ConvProblem) -> bool:
        return True

    @property
    def deterministic(self) -> bool:
        """Return whether every run gives the same bits: true on the CPU; on CUDA if torch's settings require it."""
        return self.device_type == "cpu" or TorchSettings.current().deterministic

    def is_local(self, problem: ConvProblem) -> bool:
        """Return False on CUDA, where cuDNN may choose a transform, and in half precision if the format is converted.

        oneDNN multiplies half precision in pairs of channels. With an odd number of channels one channel is multiplied
        by zeros (0 * NaN is NaN), and the memory format determines which channel that is.
        """
        return self.device_type == "cpu" and (problem.item_bytes >= 4 or not self.other_format)

    def supports(self, problem: ConvProblem) -> str | None:
        if self.other_format and self.device_type == "cpu" and sees_only_padding(problem):
            return f"the padding is {problem.padding}, not less than the filter's extent; oneDNN may crash on it"
        return None

    def supports_micro_batch(self, problem: ConvProblem, micro_batch_size: int) -> str | None:
        if self._asks_for_onednn(problem):
            return None
        usual, picked = (self._backend(problem, n) for n in (_LARGE_BATCH, micro_batch_size))
        if picked == usual:
            return None
        return (
            f"for {micro_batch_size} sample(s) torch computes {problem.operation} with its backend {picked} "
            f"instead of {usual}, which cannot be called by name"
        )

    def workspace(self, problem: ConvProblem, micro_batch_size: int) -> Workspace:
        scratch = self._scratch_parts(problem, micro_batch_size)
        return Workspace(carved_bytes(self._prepared_parts(problem)), carved_bytes(scratch))

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
        geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
        match problem.operation:
            case Operation.FORWARD:
                self._forward(problem, x_in, w_in, y, bias)
            case Operation.BACKWARD_DATA:
                x.copy_(torch_convolution(problem.operation, x_in, w_in, y_in, geometry))
            case Operation.BACKWARD_FILTER:
                gradient = torch_convolution(problem.operation, x_in, w_in, y_in, geometry)
                (accumulators or [w])[0].add_(gradient)

    def close(self, problem: ConvProblem, w: Tensor, prepared: Tensor) -> None:
        for accumulator in self._split_prepared(problem, prepared)[1]:
            w.add_(accumulator)

    def _forward(self, problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None) -> None:
        if self._asks_for_onednn(problem):
            geometry = (problem.padding, problem.stride, problem.dilation, problem.groups)
            y.copy_(torch.ops.aten.mkldnn_convolution(x, w, bias, *geometry))
        elif self.device_type == "cuda" and not self.other_format and _is_cudnns(problem, x, w):
            _cudnn_forward(problem, x, w, y, bias)
        else:
            geometry = (problem.stride, problem.padding, problem.dilation, problem.groups)
            y.copy_(torch_convolution(problem.operation, x, w, bias, geometry))

    def _asks_for_onednn(self, problem: ConvProblem) -> bool:
        """Return whether oneDNN's forward is called by name, for any number of samples.

        Problems that may crash oneDNN are excluded.
        """
        forward_on_cpu = problem.operation is Operation.FORWARD and self.device_type == "cpu" and self.by_name
        return forward_on_cpu and not sees_only_padding(problem) and self._backend(problem, _LARGE_BATCH) == _ONEDNN

    def _backend(self, problem: ConvProblem, n: int) -> str:
        """Return the name of the convolution backend that torch's dispatcher picks for ``n`` samples of the problem."""
        if self.device_type == "cpu":
            return _backend_on_cpu(problem, n, torch.get_num_threads())
        return _backend_on_cuda(_in_other_format(problem) if self.other_format else problem, n)

    def _prepared_parts(self, problem: ConvProblem) -> list[Part]:
        """Return the buffer parts for the converted filter, and for a float32 sum if the dtype has lower precision.

        The filter's part is there only if the format is converted, the sum's part only for filter gradients.
        """
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
        """Return the operands in the other memory format.

        dx is allocated but not filled: torch reads only its shape and format.
        """
        parts = self._scratch_parts(problem, x.shape[0])
        x_in, *converted = (_as_other(problem, view) for view in carve(scratch, parts))
        if problem.operation is not Operation.BACKWARD_DATA:
            x_in.copy_(x)
        for y_in in converted:
            y_in.copy_(y)
        return x_in, converted[0] if converted else y


NATIVE_ALGORITHM = Native(TORCHS_OWN)
NATIVE_OTHER_FORMAT = Native("native-other-format", other_format=True)
DISPATCHED = Native(TORCHS_OWN, by_name=False)
NATIVE_ON_CUDA = Native(TORCHS_OWN, device_type="cuda")
NATIVE_OTHER_FORMAT_ON_CUDA = replace(NATIVE_OTHER_FORMAT, device_type="cuda")


def _other_part(problem: ConvProblem, shape: Sequence[int]) -> Part:
    """Return the buffer part for a tensor, (N, C, ...), in the memory format that is not the problem's."""
    n, c, *pixels = shape
    is_contiguous = problem.memory_format is MemoryFormat.CONTIGUOUS
    return Part((n, *pixels, c) if is_contiguous else (n, c, *pixels), torch_dtype(problem))


def _as_other(problem: ConvProblem, stored: Tensor) -> Tensor:
    return stored.movedim(-1, 1) if problem.memory_format is MemoryFormat.CONTIGUOUS else stored


def _in_other_format(problem: ConvProblem) -> ConvProblem:
    contiguous = problem.memory_format is MemoryFormat.CONTIGUOUS
    return replace(problem, memory_format=MemoryFormat.CHANNELS_LAST if contiguous else MemoryFormat.CONTIGUOUS)


def _is_cudnns(problem: ConvProblem, x: Tensor, w: Tensor) -> bool:
    """Return whether torch convolves x and w with cuDNN in their own memory format, so that cuDNN can write into y.

    This is false for channels_last in float64, whose operands torch converts to the other format.
    """
    backend = _picked(problem, x, w)
    if backend.name != _CUDNN:
        return False
    memory_format = torch._C._conv_determine_backend_memory_format(x, w, backend)
    return memory_format == torch_format(problem)


def _cudnn_forward(problem: ConvProblem, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None) -> None:
    """Compute the forward convolution into y by torch's cuDNN operator, with torch's settings."""
    allowed = TorchSettings.current()
    settings = (torch.backends.cudnn.benchmark, allowed.deterministic, allowed.allow_tf32)
    geometry = (problem.padding, problem.stride, problem.dilation, problem.groups)
    torch.ops.aten.cudnn_convolution.out(x, w, *geometry, *settings, out=y)
    if bias is not None:
        y.add_(bias.view(-1, *(1 for _ in problem.positions)))


@lru_cache(maxsize=4096)
def _backend_on_cpu(problem: ConvProblem, n: int, _threads: int) -> str:
    # Torch's choice depends on shapes only, so expanded scalars save memory.
    element = torch.empty((), dtype=torch_dtype(problem), device="cpu")
    return str(_picked(problem, element.expand(problem.x_shape(n)), element.expand(problem.w_shape())).name)


def _backend_on_cuda(problem: ConvProblem, n: int) -> str:
    """Return the name of the backend that torch picks on CUDA under the current settings.

    Fake tensors, which have no data, are used, because the choice on CUDA depends on strides too.
    """
    with FakeTensorMode():
        x, w = (empty_activation(problem, shape, "cuda") for shape in (problem.x_shape(n), problem.w_shape()))
        return str(_picked(problem, x, w).name)


def _picked(problem: ConvProblem, x: Tensor, w: Tensor) -> torch._C.ConvBackend:
    """Return the convolution backend that torch's dispatcher picks for this x and w."""
    geometry = (problem.stride, problem.padding, problem.dilation, False, (0,) * len(problem.stride), problem.groups)
    return torch._C._select_conv_backend(x, w, None, *geometry)
