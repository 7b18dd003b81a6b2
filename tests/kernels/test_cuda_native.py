"""Torch's own convolution on CUDA, without a GPU: slices, and what cuDNN is asked for."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from support.clock.machine import FORWARD
from torch import Tensor

from mucudnn.core.problem import MemoryFormat, Operation
from mucudnn.kernels.registry import algorithm
from mucudnn.kernels.torch_convolution import reference, relative_l2_error
from mucudnn.kernels.torch_ops import native
from mucudnn.kernels.torch_ops.native import NATIVE_ON_CUDA
from mucudnn.testing.checks import Call
from mucudnn.testing.contract import geometry

cudnn = torch.backends.cudnn


def picks(monkeypatch: pytest.MonkeyPatch, backend: Callable[[Tensor], str]) -> list[Tensor]:
    """Torch's dispatcher as it picks by x; returns what it was asked for."""
    asked: list[Tensor] = []

    def select(x: Tensor, *_: object) -> SimpleNamespace:
        asked.append(x)
        return SimpleNamespace(name=backend(x))

    monkeypatch.setattr(torch._C, "_select_conv_backend", select)
    monkeypatch.setattr(torch._C, "_conv_determine_backend_memory_format", lambda x, w, b: torch.contiguous_format)
    return asked


def test_slices_are_refused_where_torch_picks_another_backend_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = picks(monkeypatch, lambda x: "Cudnn" if len(x) >= 8 else "CudaDepthwise2d")
    assert NATIVE_ON_CUDA.supports_micro_batch(FORWARD, 8) is None
    assert "its backend CudaDepthwise2d instead of Cudnn" in str(NATIVE_ON_CUDA.supports_micro_batch(FORWARD, 7))
    assert {x.device.type for x in asked} == {"cuda"}


@pytest.mark.parametrize("memory_format", MemoryFormat)
def test_torch_is_asked_for_operands_as_they_will_lie(
    memory_format: MemoryFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Depthwise, what it picks depends on that."""
    asked = picks(monkeypatch, lambda x: "Cudnn")
    problem, n, _ = geometry("depthwise", Operation.FORWARD, memory_format=memory_format)
    channels_last = memory_format is MemoryFormat.CHANNELS_LAST
    for a, expected in ((NATIVE_ON_CUDA, channels_last), (algorithm("native-other-format", "cuda"), not channels_last)):
        asked.clear()
        a.supports_micro_batch(problem, n)
        assert {x.is_contiguous(memory_format=torch.channels_last) for x in asked} == {expected}


class CudnnForward:
    """In the place of the operator that calls cuDNN."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
        self.settings: list[tuple[object, ...]] = []
        picks(monkeypatch, lambda x: backend)
        monkeypatch.setattr(torch.ops.aten.cudnn_convolution, "out", self)
        self.convolution = torch.ops.aten.thnn_conv2d

    def __call__(self, x: Tensor, w: Tensor, padding: object, stride: object, *rest: object, out: Tensor) -> None:
        self.settings.append(rest)
        out.copy_(self.convolution(x, w, w.shape[2:], None, stride, padding))


def test_cudnns_forward_writes_into_y_with_torchs_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, batch_size, n = geometry("same-3x3", Operation.FORWARD)
    forward = CudnnForward(monkeypatch, "Cudnn")
    monkeypatch.setattr(cudnn, "deterministic", True)
    call, bias = Call(problem, batch_size), torch.randn(problem.k)
    expected = reference(problem, call.x, call.w, call.y, bias)
    nothing = torch.empty(0, dtype=torch.uint8)
    for start in range(0, batch_size, n):
        x, y = call.x[start : start + n], call.y[start : start + n]
        NATIVE_ON_CUDA.step(problem, x, call.w, y, bias, nothing, nothing)
    assert relative_l2_error(call.y, expected) <= 1e-5
    allows_tf32 = cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    assert set(forward.settings) == {((1, 1), 1, False, True, allows_tf32)}  # dilation, groups, benchmark, ...


@pytest.mark.parametrize(
    ("name", "backend", "memory_format"),
    [
        ("native", "CudaDepthwise2d", MemoryFormat.CONTIGUOUS),
        ("native", "Cudnn", MemoryFormat.CHANNELS_LAST),  # torch computes contiguous, as it does for float64
        ("native-other-format", "Cudnn", MemoryFormat.CONTIGUOUS),
    ],
)
def test_cudnn_does_not_write_into_y_where_it_computes_in_another_format(
    name: str, backend: str, memory_format: MemoryFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, batch_size, _ = geometry("same-3x3", Operation.FORWARD, memory_format=memory_format)
    forward = CudnnForward(monkeypatch, backend)
    a = algorithm(name, "cuda")
    workspace = a.workspace(problem, batch_size)
    prepared, scratch = (
        torch.empty(size, dtype=torch.uint8) for size in (workspace.prepared_bytes, workspace.scratch_bytes)
    )
    call = Call(problem, batch_size)
    a.open(problem, call.w, prepared)
    monkeypatch.setattr(native, "torch_convolution", lambda *_: torch.ones_like(call.y))
    a.step(problem, call.x, call.w, call.y, None, prepared, scratch)
    assert forward.settings == []
    assert torch.equal(call.y, torch.ones_like(call.y))
