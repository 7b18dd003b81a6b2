"""The code on the path of every call: in C++ (``_call.cpp``) if that was built, else in Python, which is slower.

Both give the same results. A call may bypass torch's dispatcher only if its tensors are plain values in memory and no
subsystem of torch has to intercept the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from mucudnn.core.problem import Operation
from mucudnn.running.workspace import kept_by_each_thread

_keys_of = torch._C._dispatch_keys  # looked up once, since every call needs it
_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_WATCHING = (  # a true result means that a subsystem of torch intercepts calls; autocast is first, as in C++
    torch._C._is_any_autocast_enabled,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._are_functorch_transforms_active,
)

# Methods that return true for tensors whose bytes are not their values: pending negation, or named dimensions, which
# older versions of torch have.
UNUSUAL = tuple(name for name in ("is_neg", "has_names") if hasattr(Tensor, name))


def set_dispatch_modes(count: Callable[[], int]) -> None:
    """Ask this function how many dispatch modes intercept calls."""
    global _WATCHING
    _WATCHING = _WATCHING[0], count, *_WATCHING[2:]
    if extension is not None:
        set_up()


def set_up(unusual: tuple[str, ...] = UNUSUAL) -> None:
    """Pass torch's functions to the C++ extension.

    unusual: methods that return true for tensors that are not plain.

    Raises ``AttributeError`` or ``ValueError`` if torch lacks the DLPack version that the extension needs.
    """
    extension.set_up(
        Tensor,
        Parameter,
        Tensor.__dlpack_c_exchange_api__,
        torch.get_num_threads,
        torch.empty_strided,
        torch.empty_like,
        _WATCHING,
        _tracing_state,
        vars(forward_ad),
        kept_by_each_thread,
        torch.is_grad_enabled,
        tuple(Operation),
        unusual,
    )


extension: Any  # the C++ module, or None
try:
    from mucudnn.running.eager import _call as extension

    set_up()
except (ImportError, AttributeError, ValueError):  # not built, or torch lacks its DLPack version
    extension = None


def _plain_keys(device_type: str) -> frozenset[int]:
    """Return the dispatch keys of dense tensors without pending negation, made outside and inside inference mode."""
    keys = set()
    for is_inference in (False, True):
        with torch.inference_mode(is_inference):
            keys.add(_keys_of(torch.empty(0, device=device_type)).raw_repr())
    return frozenset(keys)


_ON_CPU = _plain_keys("cpu")
_plain_keys_on_cuda = cache(lambda: _plain_keys("cuda"))


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's bytes are its values, and no subclass intercepts operations on the tensor."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        return False
    keys = _keys_of(tensor).raw_repr()
    return keys in _ON_CPU or (tensor.is_cuda and keys in _plain_keys_on_cuda())


def is_eager_in_python(x: Tensor, w: Tensor, third: Tensor | None) -> bool:
    """Return whether a call may bypass torch's dispatcher: the Python version of ``is_eager``."""
    if _is_compiling() or any(watches() for watches in _WATCHING):
        return False
    if _tracing_state() is not None or forward_ad._current_level >= 0:
        return False
    return is_plain(x) and is_plain(w) and (third is None or is_plain(third))


# Runs a call whose executable is cached in ``executables`` and bound. Arguments: executables, operation, x, w, the bias
# or dy, stride, padding, dilation, groups. Returns None if torch's own is to run, and NotImplemented if nothing is
# cached for the call. Raises torch's out-of-memory errors.
run_known: Callable[..., Any] = (lambda *_: NotImplemented) if extension is None else extension.run_known

# Returns the key by which ``run_known`` finds the executable of a call, or None if it does not support the call. The
# arguments are those of ``run_known`` without executables.
known_key: Callable[..., bytes | None] = (lambda *_: None) if extension is None else extension.key

# Returns a key for what is known of a call of batch norm in training, or None if Python has to check the call.
# Arguments: the norm, which must be kept for ever, x, weight, bias, running mean, running variance.
batch_norm_key: Callable[..., bytes | None] = (lambda *_: None) if extension is None else extension.batch_norm_key

# Returns whether no subsystem of torch intercepts calls, and x, w and the bias (or None) or dy are plain tensors. Must
# not be called while torch compiles.
is_eager: Callable[[Tensor, Tensor, Tensor | None], bool] = (
    is_eager_in_python if extension is None else extension.is_eager
)
