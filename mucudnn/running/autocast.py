"""Lets autocast compute operators of ours in its type, as it does torch's convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def autocast_computes(library: Any, name: str, operator: Callable[..., Tensor]) -> None:
    """Register what autocast calls for an operator of ``library``: float64 excepted, as for torch's convolution."""
    for device_type in ("cpu", "cuda"):
        library.impl(name, _cast_and_compute(operator, device_type), f"Autocast{device_type.upper()}")


def _cast_and_compute(operator: Callable[..., Tensor], device_type: str) -> Callable[..., Tensor]:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}"))

    def cast_and_compute(*args: Any) -> Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*(_cast(a, device_type, dtype) for a in args))

    return cast_and_compute


def _cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
    eligible = isinstance(value, Tensor) and value.is_floating_point() and value.device.type == device_type
    return value.to(dtype) if eligible and value.dtype != torch.float64 else value
