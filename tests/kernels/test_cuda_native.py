"""Torch's own convolution on CUDA, without a GPU: settings, threads, slices, and what cuDNN is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from support.clock.machine import FORWARD
from torch import Tensor

from mucudnn.kernels.contract.algorithm import Algorithm
from mucudnn.kernels.contract.reference import reference, relative_l2_error
from mucudnn.kernels.registry import algorithm, algorithms
from mucudnn.kernels.torch_ops import native
from mucudnn.kernels.torch_ops.native_cuda import BENCHMARKS, NATIVE_ON_CUDA
from mucudnn.measuring.candidates import find_candidates
from mucudnn.testing.geometries import ONE_OF_EACH_KIND, geometry
from mucudnn.testing.guarded_call import Call
from mucudnn.words.problem import MemoryFormat, Operation

cudnn = torch.backends.cudnn


class Settings:
    """What torch's settings are while the convolution is called, and in which thread that is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[bool, int, bool, bool]] = []
        self.threads: list[threading.Thread] = []
        self.error: Exception | None = None
        original = native.torch_convolution

        def convolution(*operands: object) -> Tensor:
            self.seen.append((cudnn.benchmark, cudnn.benchmark_limit, cudnn.deterministic, cudnn.enabled))
            self.threads.append(threading.current_thread())
            if self.error is not None:
                raise self.error
            return original(*operands)  # type: ignore[arg-type]

        monkeypatch.setattr(native, "torch_convolution", convolution)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Of the user: a limit of 7. Reading the former setting of TF32 raises where users have set the new one."""
    monkeypatch.setattr(cudnn, "benchmark_limit", 7)
    monkeypatch.setattr(torch._C, "_get_cudnn_allow_tf32", lambda: pytest.fail("read"))
    return Settings(monkeypatch)


@pytest.mark.parametrize("found", [False, True])
def test_the_search_is_switched_on_for_the_call_alone(settings: Settings, found: bool) -> None:
    cudnn.benchmark = found
    try:
        for a in BENCHMARKS:
            step(a, Call(FORWARD, 2))
        assert settings.seen == [(True, 10, False, True), (True, 0, False, True)]
        assert (cudnn.benchmark, cudnn.benchmark_limit) == (found, 7)
    finally:
        cudnn.benchmark = False


def step(a: Algorithm, call: Call) -> None:
    nothing = torch.empty(0, dtype=torch.uint8)
    a.step(call.problem, call.x, call.w, call.y, None, nothing, nothing)


def test_settings_are_set_back_after_errors(settings: Settings) -> None:
    settings.error = torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        step(BENCHMARKS[0], Call(FORWARD, 2))
    assert (cudnn.benchmark, cudnn.benchmark_limit) == (False, 7)


def test_each_limit_has_a_thread_of_its_own(settings: Settings) -> None:
    """Torch keeps the engine that it chose first for a size and a thread, whatever the setting is later."""
    for a in (*BENCHMARKS, *BENCHMARKS, NATIVE_ON_CUDA):
        step(a, Call(FORWARD, 2))
    ten, everything, ten_again, everything_again, users = settings.threads
    assert (ten, everything) == (ten_again, everything_again)
    assert len({ten, everything, users}) == 3
    assert users is threading.current_thread()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_the_other_thread_computes_for_every_gradient_mode(mode: Callable[[], object]) -> None:
    with mode():  # type: ignore[attr-defined]
        call = Call(FORWARD, 2)
        call.w.requires_grad_(not torch.is_inference_mode_enabled())
        step(BENCHMARKS[0], call)
        expected = reference(FORWARD, call.x, call.w, call.y)
    assert relative_l2_error(call.y.detach(), expected.detach()) <= 1e-6
    assert not call.y.requires_grad


def test_no_search_where_cudnn_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(a.supports(FORWARD) is None for a in BENCHMARKS)
    monkeypatch.setattr(cudnn, "enabled", False)
    assert all("torch.backends.cudnn.enabled is False" in str(a.supports(FORWARD)) for a in BENCHMARKS)
    assert NATIVE_ON_CUDA.supports(FORWARD) is None


def test_torchs_search_is_a_candidate_undivided() -> None:
    candidates, failures = find_candidates(FORWARD, [NATIVE_ON_CUDA, *BENCHMARKS], (1, 2, 4))
    sizes: dict[str, list[int]] = {}
    for candidate in candidates:
        sizes.setdefault(candidate.algorithm.name, []).append(candidate.micro_batch_size)
    assert sizes == {"native": [1, 2, 4], "native-benchmark-10": [4], "native-benchmark-0": [4]}
    assert all("runs undivided" in failure.reason for failure in failures)


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


def test_a_real_dispatcher_picks_one_backend_for_all_sizes() -> None:
    for key, operation, memory_format in product(ONE_OF_EACH_KIND, Operation, MemoryFormat):
        problem, batch_size, _ = geometry(key, operation, memory_format=memory_format)
        assert all(NATIVE_ON_CUDA.supports_micro_batch(problem, n) is None for n in range(1, batch_size + 1))


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


def test_torchs_own_is_deterministic_where_torch_is_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = [a for a in algorithms("cuda") if a.name.startswith("native")]
    assert not any(a.deterministic for a in torchs)
    monkeypatch.setattr(cudnn, "deterministic", True)
    assert all(a.deterministic for a in torchs)
    assert all(a.deterministic for a in algorithms("cuda") if a not in torchs)
