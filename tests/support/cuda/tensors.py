"""Tensors that say they are on a GPU, while they lie in the CPU's memory, where everything is computed.

Unlike fake tensors they have values, addresses and gradients; unlike those of the CPU they refuse what a GPU refuses:
operands on two devices, and whatever waits for the device while a CUDA graph is captured.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from mucudnn.kernels.contract.caching_allocator import block_bytes
from mucudnn.running import operators
from mucudnn.words.problem import Operation

GPU = torch.device("cuda", 0)
_ATEN = torch.ops.aten
_BETWEEN_DEVICES = {_ATEN.copy_.default, _ATEN._to_copy.default}
_WITH_CPU_INDICES = {_ATEN.index.Tensor, _ATEN.index_put_.default}
_WAITING = {_ATEN._local_scalar_dense.default, _ATEN.nonzero.default}
_OURS = {
    operators.conv2d: Operation.FORWARD,
    operators.conv2d_backward_data: Operation.BACKWARD_DATA,
    operators.conv2d_backward_filter: Operation.BACKWARD_FILTER,
}
_TORCHS_CONVOLUTIONS = {
    _ATEN.convolution.default,
    _ATEN.convolution_backward.default,
    _ATEN.cudnn_convolution.out,
}
_TORCHS_TIME_S = 0.005  # they are slow, so that something else is chosen
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


@dataclass
class Memory:
    """Counts as torch's caching allocator does: whole blocks, and what was asked for."""

    blocks: int = 0
    peak_blocks: int = 0
    requested: int = 0
    peak_requested: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _known: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)

    def take(self, storage: torch.UntypedStorage) -> None:
        """Counted until it dies, once."""
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._known:
                return
            self._known[key] = weakref.ref(storage, lambda _: self._give_back(key, size))
            self._add(size, 1)
            self.peak_blocks = max(self.peak_blocks, self.blocks)
            self.peak_requested = max(self.peak_requested, self.requested)

    def reset_peaks(self) -> None:
        self.peak_blocks, self.peak_requested = self.blocks, self.requested

    def _give_back(self, key: int, size: int) -> None:
        with self._lock:
            del self._known[key]
            self._add(size, -1)

    def _add(self, size: int, sign: int) -> None:
        self.blocks += sign * block_bytes(size, "cuda")
        self.requested += sign * size


@dataclass
class DeviceClock:
    """Time that the process computed, whatever else the machine does, and that which convolutions pretend to take."""

    pretended_s: float = 0.0

    def now_s(self) -> float:
        return time.process_time() + self.pretended_s


class Leaving(threading.local):
    """Whether what is copied goes to the CPU: operators that keep the device name the one that C++ sees."""

    now = False


MEMORY = Memory()
CLOCK = DeviceClock()
LEAVING = Leaving()
CAPTURING = threading.Event()
CAPTURED: list[Callable[[], None]] = []  # since the last capture began


class OnGpu(Tensor):
    """``inner``: where it lies. To torch's C++ it is on the CPU, for lack of CUDA's autograd; to Python on ``GPU``."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inner: Tensor
    device = GPU
    is_cuda = True
    is_cpu = False

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        with torch.inference_mode(inner.is_inference()):  # views of other tensors are none, also in inference mode
            made = Tensor._make_wrapper_subclass(cls, inner.shape, **layout, _extra_dispatch_keys=_AUTOCAST)
        made.inner = inner
        MEMORY.take(inner.untyped_storage())
        return made

    def __repr__(self) -> str:
        return f"OnGpu({self.inner})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = _rebuilt(self.inner.detach().clone(), self.requires_grad, isinstance(self, nn.Parameter))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.inner.detach(), self.requires_grad, isinstance(self, nn.Parameter))

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        _refuse(func, args, kwargs)
        if func in _OURS:  # they are to see tensors of a GPU
            return operators._computed(_OURS[func], *args)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        run = partial(_computed, func, tree_map(_inner, args), tree_map(_inner, kwargs))
        result = run()
        if CAPTURING.is_set():
            CAPTURED.append(partial(_run_again, run, result))
        if LEAVING.now and func is _ATEN._to_copy.default:
            return result
        if func is _ATEN.copy_.default and not isinstance(args[0], OnGpu):
            return args[0]
        wrapped = tree_map(lambda value: OnGpu(value) if isinstance(value, Tensor) else value, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _rebuilt(inner: Tensor, requires_grad: bool, is_parameter: bool) -> OnGpu:
    made = OnGpu(inner).requires_grad_(requires_grad)
    if is_parameter:
        made._is_param = True
    return made


def _run_again(run: Callable[[], Any], result: Any) -> None:
    """Into the memory of the first result."""
    for first, again in zip(_tensors(result), _tensors(run()), strict=True):
        first.copy_(again)


def on_gpu(inner: Tensor) -> OnGpu:
    return inner if isinstance(inner, OnGpu) else OnGpu(inner)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnGpu) else value


def _refuse(func: Any, args: Any, kwargs: Any) -> None:
    """What a GPU refuses."""
    if CAPTURING.is_set() and (func in _WAITING or LEAVING.now):
        raise RuntimeError(f"CUDA error: {func} is not permitted when stream is capturing")
    if func in _BETWEEN_DEVICES:
        return
    operands = args[:1] if func in _WITH_CPU_INDICES else (args, kwargs)
    elsewhere = [tensor for tensor in _tensors(operands) if not isinstance(tensor, OnGpu) and tensor.dim()]
    if elsewhere:
        shapes = [tuple(tensor.shape) for tensor in elsewhere]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func}, "
            f"{shapes} are on the CPU)"
        )


def _tensors(values: Any) -> Iterator[Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, Tensor))


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    if func in _TORCHS_CONVOLUTIONS:
        CLOCK.pretended_s += _TORCHS_TIME_S
    if func is _ATEN.cudnn_convolution.out:
        x, w, padding, stride, dilation, groups, *_ = args
        return kwargs["out"].copy_(torch.convolution(x, w, None, stride, padding, dilation, False, (0, 0), groups))
    return func(*args, **kwargs)
