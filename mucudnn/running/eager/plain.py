"""Tells tensors and circumstances in which a call is what it seems: values in memory, and nothing that wants to see it.

Only then may a call go past torch's dispatcher.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_keys_of = torch._C._dispatch_keys  # looked up once, since every call asks
_is_compiling = torch.compiler.is_compiling
tracing_state = torch._C._get_tracing_state
_is_any_autocast_enabled, _are_transforms_active = (
    torch._C._is_any_autocast_enabled,
    torch._C._are_functorch_transforms_active,
)
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
WATCHING = (_is_any_autocast_enabled, _dispatch_modes, _function_modes, _are_transforms_active)  # any of these does


def _plain_keys(device_type: str) -> frozenset[int]:
    """Find the dispatch keys of dense tensors without pending negation, made outside and inside inference mode."""
    found = set()
    for inside in (False, True):
        with torch.inference_mode(inside):
            found.add(_keys_of(torch.empty(0, device=device_type)).raw_repr())
    return frozenset(found)


_ON_CPU = _plain_keys("cpu")
_plain_keys_on_cuda = cache(lambda: _plain_keys("cuda"))


def is_plain(tensor: Tensor) -> bool:
    """Tell whether its elements are what its bytes say, and no subclass wants to see what is done to it."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        return False
    keys = _keys_of(tensor).raw_repr()
    return keys in _ON_CPU or (tensor.is_cuda and keys in _plain_keys_on_cuda())


def nobody_watches() -> bool:
    """Tell whether calls are executed as they stand: nothing is traced, no mode sees or changes them, no transform."""
    return not (
        _is_compiling()
        or _is_any_autocast_enabled()
        or _dispatch_modes()
        or _function_modes()
        or _are_transforms_active()
        or tracing_state() is not None
        or forward_ad._current_level >= 0
    )
