"""The code on the path of every call: in C++ (``_call.cpp``) if that was built, else in Python, which is slower.

Both give the same results. A call may bypass torch's dispatcher only if its tensors are plain values in memory and no
subsystem of torch has to intercept the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from mucudnn.core.problem import Operation
from mucudnn.kernels.algorithm import BoundStage
from mucudnn.running.workspace import kept_by_each_thread

Bound = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_OPERATIONS = tuple(Operation)  # in the order of _call.cpp
_keys_of = torch._C._dispatch_keys  # looked up once, since every call needs it
_is_compiling = torch.compiler.is_compiling
_tracing_state = torch._C._get_tracing_state
_WATCHING = (  # a true result means that a subsystem of torch intercepts calls
    torch._C._is_any_autocast_enabled,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._are_functorch_transforms_active,
)

# Methods that return true for tensors whose bytes are not their values: pending negation, or named dimensions, which
# older versions of torch have.
UNUSUAL = tuple(name for name in ("is_neg", "has_names") if hasattr(Tensor, name))


def set_up(unusual: tuple[str, ...] = UNUSUAL) -> None:
    """Pass torch's functions to the C++ extension. unusual: methods that return true for tensors that are not plain.

    Raises ``AttributeError`` or ``ValueError`` if torch lacks the DLPack version that the extension needs.
    """
    _call.set_up(
        *(Tensor, Parameter, Tensor.__dlpack_c_exchange_api__),
        *(torch.get_num_threads, torch.empty_strided, torch.empty_like),
        *(_WATCHING, _tracing_state, vars(forward_ad), kept_by_each_thread),
        *(torch.is_grad_enabled, _OPERATIONS, unusual),
    )


try:
    from mucudnn.running.eager import _call

    set_up()
except (ImportError, AttributeError, ValueError):  # not built, or torch lacks its DLPack version
    is_built = False
else:
    is_built = True


def _plain_keys(device_type: str) -> frozenset[int]:
    """Return the dispatch keys of dense tensors without pending negation, made outside and inside inference mode."""
    found = set()
    for inside in (False, True):
        with torch.inference_mode(inside):
            found.add(_keys_of(torch.empty(0, device=device_type)).raw_repr())
    return frozenset(found)


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
run_known: Callable[..., Any] = _call.run_known if is_built else lambda *_: NotImplemented

# Returns the key by which ``run_known`` finds the executable of a call, or None if it does not support the call. The
# arguments are those of ``run_known`` without executables.
known_key: Callable[..., bytes | None] = _call.key if is_built else lambda *_: None

# Returns whether no subsystem of torch intercepts calls, and x, w and the bias (or None) or dy are plain tensors. Must
# not be called while torch compiles.
is_eager: Callable[[Tensor, Tensor, Tensor | None], bool] = _call.is_eager if is_built else is_eager_in_python


def compiled_functions(values_in_python: Callable[..., Tensor]) -> Any:
    """Return the C++ module with the functions ``values`` and ``gradients``; None if it was not built.

    values_in_python: Python version of ``values``, for calls that the C++ code does not support.
    """
    if not is_built:
        return None
    _call.set_values_in_python(values_in_python)
    return _call


def bound_in_cpp(
    operation: Operation,
    stages: Sequence[tuple[BoundStage | None, int]],
    scratch: slice,
    *,
    is_channels_last: bool,
    result: tuple[object, ...],
    new_large: Callable[[], Tensor] | None,
    otherwise: Bound,
) -> Bound | None:
    """Return a C++ function that runs an executable on the CPU; None if that is not possible.

    stages: pairs of a stage and the offset of its prepared bytes in the workspace.
    scratch: range of the scratch at the end of the workspace. result: shape, strides, dtype and device of the result.
    new_large: allocates a large result; None if the result is not large.

    otherwise: Python function that runs the executable on any operands. It is called if they are not dense, or if
    this thread has no workspace yet.
    """
    if not is_built:
        return None
    entries = []
    for stage, prepared in stages:
        if stage is None or stage.entry is None:
            return None
        entries.append((*stage.entry, prepared))
    bound: Bound = _call.Bound(
        *(_OPERATIONS.index(operation), tuple(entries), scratch.start, scratch.stop, is_channels_last),
        *(result, ("dtype", "device"), new_large, otherwise),
    )
    return bound
