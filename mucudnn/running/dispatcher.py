"""Process-wide wrappers around torch's own convolutions in torch's dispatcher.

Every convolution of torch (modules, subclasses and functional calls, one to three dimensions, transposed or not) ends
in ``aten::convolution`` or ``aten::convolution_backward``, below autograd, autocast, ``torch.func`` and
``torch.compile``. While there is a wrapper, a Python function replaces these kernels for each device type; other
operators are not slowed down. Torch's own kernel, the same for all devices, is fetched first with
``torch.library.get_kernel``.

Torch frees a Python kernel when it is deregistered, even while another thread calls it, so kernels are deregistered
only if the process has a single thread. Otherwise the last ``pop`` leaves them registered, and they call torch's own.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from mucudnn.core.errors import UnavailableError

Kernel = Callable[..., Any]  # called like the operator, with positional arguments
Wrap = Callable[..., Any]  # takes the next kernel, then the operator's arguments

DEVICE_TYPES = ("cpu", "cuda")

_FORWARD, _BACKWARD = "convolution", "convolution_backward"
_LEAST_TORCH = "2.9"
_TORCHS_REGISTRATION = "/aten/src/ATen/Register"  # in the names of the files that torch generates
_inner_convolution: Kernel = torch._convolution


@dataclass(frozen=True, slots=True, eq=False)
class Wrapper:
    """Pair of functions that replace torch's kernels on all devices of ``DEVICE_TYPES``.

    forward(following, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups): returns y.
    backward(following, dy, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
    output_mask): returns the gradients of input, weight and bias; None for those that the mask excludes. ``following``,
    the next wrapper or at last torch's own kernel, takes the remaining arguments and computes the result. Both
    functions run below autograd, which does not record them.
    """

    forward: Wrap
    backward: Wrap


def push(wrapper: Wrapper) -> None:
    """Add an outermost wrapper around torch's convolutions, which is called first.

    The first wrapper registers our kernels, unless they are still registered. Avoid this while other threads compute
    convolutions, since torch's table has no lock for readers. Raises ``UnavailableError`` if torch is too old, or if
    another package has replaced the kernels.
    """
    with _changing:
        if not _wrappers:
            _install()
        _wrappers.append(wrapper)
        _rebuild()


def pop(wrapper: Wrapper) -> None:
    """Remove a wrapper around torch's convolutions from any position; ignore an unknown wrapper.

    After the last one torch's own kernels run again: directly in a single-threaded process, else called by ours.
    """
    with _changing:
        if wrapper in _wrappers:
            _wrappers.remove(wrapper)
            _rebuild()
            if not _wrappers and len(sys._current_frames()) == 1:  # torch's internal threads do not count
                _uninstall()


@contextmanager
def wrapped(wrapper: Wrapper) -> Iterator[None]:
    """Install a wrapper around torch's convolutions inside the context: ``push`` first, ``pop`` at the end."""
    push(wrapper)
    try:
        yield
    finally:
        pop(wrapper)


class Untouched:
    """Context in which this thread's convolutions bypass all wrappers; it may be nested.

    Wrappers use it for their own convolutions, and measurements for torch's.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _thread.untouched += 1

    def __exit__(self, *_: object) -> None:
        _thread.untouched -= 1


untouched = Untouched()  # used as ``with untouched:``


def torchs_kernel(operator: str, device_type: str) -> Kernel:
    """Return torch's own kernel of ``convolution`` or ``convolution_backward``, without wrappers.

    Raises ``UnavailableError`` if torch is too old, or another package has replaced the kernel.
    """
    with _changing:
        for hook in _hooks:
            if (hook.operator, hook.device_type) == (operator, device_type):
                return hook.own
        return _fetched(operator, device_type)


def _fetched(operator: str, device_type: str) -> Kernel:
    if not hasattr(torch.library, "get_kernel"):
        raise UnavailableError(
            f"torch {torch.__version__} cannot hand out its kernels (torch.library.get_kernel): install torch "
            f"{_LEAST_TORCH} or later, or use mucudnn.optimize"
        )
    _require_unreplaced(operator, device_type)
    qualified, key = f"aten::{operator}", device_type.upper()
    if operator == _FORWARD and device_type == "cpu":
        return _cpu_convolution
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return partial(torch.library.get_kernel(qualified, key).call_boxed, keys)


def _require_unreplaced(operator: str, device_type: str) -> None:
    """Raise ``UnavailableError`` if another package has registered a kernel of this operator for this device type.

    Torch's own kernels are for all devices, except that it registers ``convolution_backward`` for CUDA separately.
    """
    qualified, key = f"aten::{operator}", device_type.upper()
    registered = torch._C._dispatch_dump(qualified).splitlines()
    kernels = [line for line in registered if line.startswith((f"{key}:", f"{key} (inactive):"))]
    if sum(_TORCHS_REGISTRATION not in line for line in kernels) > len(_libraries):
        raise UnavailableError(
            f"{qualified} is replaced by another package on {device_type}, and cannot be wrapped: use mucudnn.optimize"
        )


def _cpu_convolution(*arguments: Any) -> Any:
    """Call the function behind ``aten::convolution`` directly, without the overhead of boxing arguments.

    The flags that are off concern GPU libraries: benchmark mode, determinism, whether they are used, and TF32.
    """
    return _inner_convolution(*arguments, False, False, False, False)


class _Hook:
    """Replacement of one of torch's convolution kernels; ``call`` is the outermost wrapper's function."""

    __slots__ = ("call", "device_type", "operator", "own")

    def __init__(self, operator: str, device_type: str) -> None:
        self.operator, self.device_type = operator, device_type
        self.own = self.call = _fetched(operator, device_type)

    def function(self) -> Kernel:
        """Return the function that torch calls in place of its kernel: a closure, which is faster than a method."""
        torchs_own, thread, tracing_state = self.own, _thread, torch._C._get_tracing_state

        def hooked(*arguments: Any) -> Any:  # torch.jit.trace would record what a wrapper runs
            return (torchs_own if thread.untouched or tracing_state() is not None else self.call)(*arguments)

        _hide_from_compiler(hooked)
        return hooked


def _hide_from_compiler(function: Any) -> None:
    """Make ``torch.compile`` skip a function and all functions that it calls.

    Even outside its graphs, ``torch.compile`` compiles Python functions, which would take many seconds for the code
    behind our kernels. ``torch.compiler.disable`` has the same effect, but costs microseconds per call.
    """
    with suppress(AttributeError):  # older torch lacks it
        eval_frame: Any = torch._C._dynamo.eval_frame
        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


class _OfThisThread(threading.local):
    untouched = 0


_thread = _OfThisThread()
_changing = threading.RLock()
_wrappers: list[Wrapper] = []  # the last one is called first
_hooks: list[_Hook] = []
_libraries: list[Any] = []  # at most one, with our kernels


def _install() -> None:
    if _libraries:
        for hook in _hooks:
            _require_unreplaced(hook.operator, hook.device_type)
        return
    hooks = [_Hook(operator, device) for operator in (_FORWARD, _BACKWARD) for device in DEVICE_TYPES]
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")  # that is the purpose
        for hook in hooks:
            library.impl(hook.operator, hook.function(), hook.device_type.upper())
    _hooks[:], _libraries[:] = hooks, [library]


def _uninstall() -> None:
    _libraries.pop()._destroy()
    _hooks.clear()


def _rebuild() -> None:
    for hook in _hooks:
        wraps = [wrapper.forward if hook.operator == _FORWARD else wrapper.backward for wrapper in _wrappers]
        hook.call = reduce(lambda following, wrap: partial(wrap, following), wraps, hook.own)
