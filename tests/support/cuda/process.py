"""A process that believes in a GPU, so that everything of ``--device cuda`` runs on a machine without one.

Tensors are those of ``tensors.py``, and ``runtime.py`` is what torch shows of CUDA. ``cudnn/backend.py`` is in cuDNN's
place, ``cudnn/library.py`` in that of its library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.cuda.emulator import EmulatedLauncher
from support.cuda.runtime import NAME, Generator, Streams, captured_too, torch_cuda
from support.cuda.tensors import CAPTURING, CLOCK, GPU, LEAVING, OnGpu, on_gpu
from support.cudnn.backend import FakeBackend, in_the_place_of_cudnn
from support.cudnn.library import FakeCudnn, FakeEngine
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException

from mucudnn.kernels.contract import allocation
from mucudnn.kernels.cudnn import device, library
from mucudnn.kernels.cudnn.constants import Attribute, HeuristicMode
from mucudnn.kernels.winograd import algorithms as winograd
from mucudnn.kernels.winograd.cuda_backend import CudaWinograd
from mucudnn.measuring import whole_runs
from mucudnn.measuring.timing.synchronized_clock import SynchronizedClock
from mucudnn.tracing import headroom


@dataclass
class PretendedGpu:
    """``backend``: in cuDNN's place. ``cudnn``: its library, for lists."""

    backend: FakeBackend
    cudnn: FakeCudnn


class Launcher(EmulatedLauncher):
    """CuPy's place."""

    def launch(
        self,
        source: str,
        function: str,
        grid_blocks: int,
        block_threads: int,
        pointers: Sequence[int],
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        assert device == GPU
        cpu = torch.device("cpu")
        captured_too(super().launch)(source, function, grid_blocks, block_threads, pointers, sizes, cpu)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """CuPy is absent: see ``emulated_launcher``."""
    cudnn = _fake_library(monkeypatch)
    pretended = PretendedGpu(in_the_place_of_cudnn(monkeypatch), cudnn)
    monkeypatch.setattr(whole_runs, "prover", lambda: None)  # another process pretends nothing
    pretended.backend.execute = captured_too(pretended.backend.execute)  # type: ignore[method-assign]
    streams = Streams()
    for name, value in torch_cuda(streams).items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    for name, value in _of_torch_c(streams).items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    for name in ("to", "cuda", "cpu"):
        monkeypatch.setattr(Tensor, name, globals()[f"_{name}"])
    for setting in ("set_autocast_enabled", "set_autocast_dtype"):
        monkeypatch.setattr(torch, setting, _for_cpu_too(getattr(torch, setting)))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(FakeTensorMode, "from_tensor", _refusing_ours(FakeTensorMode.from_tensor))
    for factory in ("tensor", "as_tensor"):  # they fill memory that C++ takes for the CPU's
        monkeypatch.setattr(torch, factory, _moved_afterwards(getattr(torch, factory)))
    monkeypatch.setattr(SynchronizedClock, "now", lambda self: CLOCK.now_s())
    monkeypatch.setattr(allocation, "_counted", {})
    headroom._counted.cache_clear()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    factories = torch.library.Library("aten", "IMPL", "CUDA")
    factories.impl("empty.memory_format", _empty)
    factories.impl("empty_strided", _empty_strided)
    try:
        yield pretended
    finally:
        factories._destroy()
        CAPTURING.clear()
        torch.__future__.set_overwrite_module_params_on_conversion(before)
        headroom._counted.cache_clear()


@pytest.fixture
def emulated_launcher(gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> EmulatedLauncher:
    """Our own CUDA C++ runs, compiled by g++."""
    launcher = Launcher()
    monkeypatch.setattr(winograd, "BACKENDS_ON_CUDA", (CudaWinograd(launcher), *winograd.BACKENDS_ON_CUDA[1:]))
    return launcher


def _fake_library(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    """What ``library()`` loads, with a description of its device."""
    proposed = {HeuristicMode.A: [(2, ((2, 5),)), (0, ())], HeuristicMode.FALLBACK: [(0, ())]}
    cudnn = FakeCudnn((FakeEngine(0, knobs={2: (0, 5, 1)}), FakeEngine(2, knobs={2: (0, 5, 1)})), proposed)
    described = list(f'{{"deviceName": "{NAME}"}}\0'.encode())
    finalize = cudnn.cudnnBackendFinalize.body

    def finalized(pointer: Any) -> object:
        cudnn.alive[pointer.value].content.setdefault(Attribute.DEVICEPROP_JSON_REPRESENTATION, described)
        return finalize(pointer)

    cudnn.cudnnBackendFinalize.body = finalized
    monkeypatch.setattr(library.ctypes, "CDLL", _instead_of_cudnn(cudnn))
    monkeypatch.setenv("MUCUDNN_LIBCUDNN", "libcudnn.so.9")
    loaded = library.Library("libcudnn.so.9")
    for module in (library, device):
        monkeypatch.setattr(module, "library", lambda: loaded)
    return cudnn


def _instead_of_cudnn(cudnn: FakeCudnn) -> Any:
    load = ctypes.CDLL
    return lambda name, *rest, **named: cudnn if "libcu" in str(name) else load(name, *rest, **named)


def _of_torch_c(streams: Streams) -> dict[str, Any]:
    """By the name in ``torch._C``."""
    select, determine = torch._C._select_conv_backend, torch._C._conv_determine_backend_memory_format

    def selected(x: Tensor, *rest: Any) -> Any:
        if x.device.type == "cuda" and torch.backends.cudnn.enabled:
            return torch._C._ConvBackend.Cudnn
        return select(x, *rest)

    def determined(x: Tensor, w: Tensor, backend: Any) -> Any:
        if backend.name != "Cudnn":
            return determine(x, w, backend)
        if any(torch._prims_common.suggest_memory_format(operand) is torch.channels_last for operand in (x, w)):
            return torch.channels_last
        return torch.contiguous_format

    return {
        "_select_conv_backend": selected,
        "_conv_determine_backend_memory_format": determined,
        "_cuda_getCurrentRawStream": lambda index: streams.current_stream().cuda_stream,
        "_host_emptyCache": lambda: None,
    }


def _to(self: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    device = torch.device(device or self.device)
    result = self
    if dtype is not None or memory_format is not None or copy:
        as_asked = {"memory_format": memory_format or torch.preserve_format, "copy": copy}
        result = _torchs_to(self, dtype or self.dtype, **as_asked)
    if device.type == self.device.type:
        return result
    LEAVING.now = device.type == "cpu"
    try:
        return torch.ops.aten._to_copy(result, device=GPU if device.type == "cuda" else device)
    finally:
        LEAVING.now = False


def _cuda(self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Tensor:
    return _to(self, "cuda")


def _cpu(self: Tensor, memory_format: Any = None) -> Tensor:
    return _to(self, "cpu")


_torchs_to = Tensor.to


def _for_cpu_too(set_autocast: Callable[..., None]) -> Callable[..., None]:
    """Torch's own autocast goes by the device that C++ sees."""

    def both(*arguments: Any) -> None:
        set_autocast(*arguments)
        if arguments[0] == "cuda":
            set_autocast("cpu", *arguments[1:])

    return both


def _refusing_ours(from_tensor: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A CPU build has no autograd for fake tensors on CUDA, and would abort."""

    def faked(mode: FakeTensorMode, tensor: Tensor, *rest: Any, **named: Any) -> Tensor:
        if isinstance(tensor, OnGpu):
            raise UnsupportedFakeTensorException("no autograd for fake tensors on CUDA")
        return from_tensor(mode, tensor, *rest, **named)

    return faked


def _moved_afterwards(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(data: Any, *, device: Any = None, **rest: Any) -> Tensor:
        tensor = factory(data, **rest)
        return tensor if device is None else tensor.to(device)

    return made


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> OnGpu:
    return on_gpu(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> OnGpu:
    return on_gpu(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))
