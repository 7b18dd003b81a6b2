"""A process that believes in a GPU, so that everything of ``--device cuda`` runs on a machine without one.

Tensors are those of ``pretend_tensor.py``, ``fake_backend.py`` is in cuDNN's place and ``fake_cudnn.py`` in that of its
library, events are read from the CPU's clock, and streams, graphs and CUDA's own counters are kept as torch shows them.
What is captured is run while it is, and not again.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_cuda import EmulatedLauncher
from fake_backend import FakeBackend, in_the_place_of_cudnn
from fake_cudnn import FakeCudnn, FakeEngine
from pretend_tensor import CAPTURING, GPU, LEAVING, MEMORY, OnGpu, on_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedFakeTensorException

from mucudnn import headroom
from mucudnn.kernels import allocation, winograd
from mucudnn.kernels.cudnn import device, library
from mucudnn.kernels.cudnn.constants import Attribute, HeuristicMode
from mucudnn.kernels.winograd_cuda import CudaWinograd

NAME = "NVIDIA Pretended"
PROPERTIES = SimpleNamespace(
    name=NAME,
    major=9,
    minor=0,
    total_memory=2**30,
    L2_cache_size=2**16,
    multi_processor_count=132,
    uuid="00000000-0000-0000-0000-000000000000",
)


class Stream:
    """``cuda_stream``: 0 is the default one."""

    _made = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream._made += 1
        self.cuda_stream, self.device = 64 * Stream._made, GPU

    def synchronize(self) -> None:
        _synchronize()

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self._enable_timing = enable_timing
        self._at_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        _synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        assert self._enable_timing
        assert end._enable_timing
        assert self._at_s is not None
        assert end._at_s is not None
        return 1000 * (end._at_s - self._at_s)


class Graph:
    def capture_begin(self, *_: Any, **__: Any) -> None:
        assert not CAPTURING.is_set()
        CAPTURING.set()

    def capture_end(self) -> None:
        CAPTURING.clear()

    def replay(self) -> None:
        pass


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Generator:
        made: Generator = super().__new__(cls, "cpu")
        return made


@dataclass
class OfThread(threading.local):
    stream: Stream | None = None


@dataclass
class PretendedGpu:
    """``backend``: in cuDNN's place. ``cudnn``: its library, for lists. ``launched``: our own CUDA functions."""

    backend: FakeBackend
    cudnn: FakeCudnn
    default_stream: Stream = field(default_factory=Stream)
    of_thread: OfThread = field(default_factory=OfThread)

    def current_stream(self, device: Any = None) -> Stream:
        return self.of_thread.stream or self.default_stream

    def set_stream(self, stream: Stream) -> None:
        self.of_thread.stream = stream

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.of_thread.stream
        self.of_thread.stream = stream or before
        try:
            yield
        finally:
            self.of_thread.stream = before


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
        super().launch(source, function, grid_blocks, block_threads, pointers, sizes, torch.device("cpu"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """CuPy is absent: see ``emulated_launcher``."""
    cudnn = _fake_library(monkeypatch)
    pretended = PretendedGpu(in_the_place_of_cudnn(monkeypatch), cudnn)
    pretended.default_stream.cuda_stream = 0
    for name, value in _of_torch_cuda(pretended).items():
        monkeypatch.setattr(torch.cuda, name, value, raising=False)
    for name, value in _of_torch_c(pretended).items():
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


def _of_torch_cuda(pretended: PretendedGpu) -> dict[str, Any]:
    """By the name in ``torch.cuda``."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _require_known,
        "device": _device,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_arch_list": lambda: ["sm_80", "sm_90", "compute_120"],
        "mem_get_info": lambda device=None: (2**29, 2**30),
        "default_generators": (Generator("cuda"),),
        "synchronize": _synchronize,
        "_sleep": _sleep,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda device=None: MEMORY.reset_peaks(),
        "memory_allocated": lambda device=None: MEMORY.blocks,
        "max_memory_allocated": lambda device=None: MEMORY.peak_blocks,
        "memory_stats": _memory_stats,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "current_stream": pretended.current_stream,
        "default_stream": lambda device=None: pretended.default_stream,
        "set_stream": pretended.set_stream,
        "stream": pretended.stream,
        "is_current_stream_capturing": CAPTURING.is_set,
    }


def _of_torch_c(pretended: PretendedGpu) -> dict[str, Any]:
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
        "_cuda_getCurrentRawStream": lambda index: pretended.current_stream().cuda_stream,
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


@contextmanager
def _device(device: Any) -> Iterator[None]:
    _require_known(device)
    yield


def _require_known(device: Any) -> None:
    assert device in (0, GPU, torch.device("cuda"), "cuda", "cuda:0", None), device


def _synchronize(device: Any = None) -> None:
    if CAPTURING.is_set():
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def _sleep(cycles: int) -> None:
    assert isinstance(cycles, int)
    assert cycles >= 0


def _memory_stats(device: Any = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": MEMORY.blocks,
        "allocated_bytes.all.peak": MEMORY.peak_blocks,
        "requested_bytes.all.current": MEMORY.requested,
        "requested_bytes.all.peak": MEMORY.peak_requested,
    }
