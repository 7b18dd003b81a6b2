"""Micro-batch sizes for ``nn.Conv3d``: the largest for which torch's convolution fits the workspace limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mucudnn.kernels.contract.allocation import peak_requested_bytes
from mucudnn.kernels.contract.buffers import suggests_channels_last
from mucudnn.modules.conv3d import OPERATORS, UNDIVIDED, DividedOperation
from mucudnn.modules.tuned_classes import why_left_alone
from mucudnn.modules.tuned_module import padded
from mucudnn.tracing.convolutions import dtype_of
from mucudnn.words.config import Config
from mucudnn.words.problem import Operation
from mucudnn.words.units import exact_bytes, format_bytes
from mucudnn.words.warning import warn

Divided = dict[str, tuple[DividedOperation, ...]]  # by module name


def divide_3d(model: nn.Module, sample_input: Any, config: Config, device_type: str) -> Divided:
    """Choose micro-batches for every ``nn.Conv3d`` in ``model(sample_input)``, if there is a workspace limit in bytes.

    Torch's convolution stays undivided without a limit, with the limit "headroom", which torch's step fits by
    definition, and with a budget, which is divided only among layers with several algorithms. Bytes are counted by
    running each operation on zeros. If even the smallest micro-batches exceed the limit, the layer stays undivided,
    with a warning.
    """
    limit_bytes = None if config.has_headroom_limit else config.workspace_limit_bytes
    if limit_bytes is None:
        return {}
    counted: dict[tuple[_Call, Operation], DividedOperation] = {}
    divided: Divided = {}
    for name, call in _calls(model, sample_input):
        for operation in config.operations:
            if operation is Operation.BACKWARD_DATA and not call.input_needs_gradient:
                continue
            if (call, operation) not in counted:
                counted[call, operation] = _choose(name, call, operation, limit_bytes, device_type)
            divided[name] = (*divided.get(name, ()), counted[call, operation])
    return divided


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of an ``nn.Conv3d``, described by all properties that affect its memory.

    x_shape: the input shape, including padding that torch adds first.
    """

    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    geometry: tuple[Any, ...]
    dtype: torch.dtype
    formats: tuple[torch.memory_format, torch.memory_format]  # of x and w
    input_needs_gradient: bool


def _calls(model: nn.Module, sample_input: Any) -> list[tuple[str, _Call]]:
    """Run the model once. Return, for each module and shape of one sample, the call with the most samples."""
    largest: dict[tuple[str, tuple[int, ...]], _Call] = {}

    def record(name: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = arguments[0] if arguments else named.get("input")
        if not isinstance(x, Tensor) or x.dim() != 5 or len(x) == 0:
            return  # torch raises the error
        call = _call_of(cast(nn.Conv3d, module), x)
        known = largest.get((name, call.x_shape[1:]))
        if known is None or known.x_shape < call.x_shape:
            largest[name, call.x_shape[1:]] = call

    arguments = sample_input if isinstance(sample_input, tuple) else (sample_input,)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv3d) and why_left_alone(module) is None:
                handle = module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
                hooks.callback(handle.remove)
        model(*arguments)
    return [(name, call) for (name, _), call in largest.items()]


def _call_of(module: nn.Conv3d, x: Tensor) -> _Call:
    inside, padding = padded(module, x, module.weight)
    geometry = module.stride, padding, module.dilation, module.groups
    formats = _format_of(x), _format_of(module.weight)
    dtype = getattr(torch, dtype_of(x))
    return _Call(tuple(inside.shape), tuple(module.weight.shape), geometry, dtype, formats, x.requires_grad)


def _format_of(tensor: Tensor) -> torch.memory_format:
    return torch.channels_last_3d if suggests_channels_last(tensor) else torch.contiguous_format


def _choose(name: str, call: _Call, operation: Operation, limit_bytes: int, device_type: str) -> DividedOperation:
    n, within = call.x_shape[0], f"the limit of {format_bytes(limit_bytes)}"
    undivided = _needed_bytes(call, operation, n, UNDIVIDED, device_type)
    made = partial(DividedOperation, operation, call.x_shape)
    if undivided <= limit_bytes:
        return made(UNDIVIDED, undivided, undivided, f"within {within}")
    least = undivided
    for size in _sizes(n):
        # Two slices and the remainder suffice: only the first runs before the result exists
        needed = _needed_bytes(call, operation, min(n, 2 * size + n % size), size, device_type)
        if needed <= limit_bytes:
            return made(size, undivided, needed, f"the largest micro-batch within {within}")
        least = min(least, needed)
    warn(
        f"{name or 'the model itself'}: {operation} of {n} samples needs {exact_bytes(least)} in micro-batches, above "
        f"{within}; PyTorch's own runs, undivided, and takes {format_bytes(undivided)}: raise the workspace limit",
    )
    return made(UNDIVIDED, undivided, undivided, f"{format_bytes(least)} in micro-batches, above {within}")


def _sizes(n: int) -> Iterator[int]:
    """Yield the possible micro-batch sizes for n samples, largest first: divisors of n and powers of two below n."""
    return (size for size in range(n - 1, 0, -1) if n % size == 0 or size & (size - 1) == 0)


def _needed_bytes(call: _Call, operation: Operation, n: int, size: int, device_type: str) -> int:
    """Run an operation on n samples in micro-batches; return the bytes that it allocates in addition to its result."""
    x_format, w_format = call.formats
    empty = partial(torch.empty, dtype=call.dtype, device=device_type)
    x = empty((n, *call.x_shape[1:]), memory_format=x_format).zero_()
    w = empty(call.w_shape, memory_format=w_format).zero_()
    bias, sizes = w.new_zeros(len(w)), [size] * len(Operation)
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        third = bias
        if operation is not Operation.FORWARD:
            third = torch.zeros_like(OPERATORS[Operation.FORWARD](x, w, None, *call.geometry, sizes))
        run = partial(OPERATORS[operation], x, w, third, *call.geometry, sizes)
        if device_type == "cuda":
            run()  # warm-up: libraries allocate memory that they keep
        results: list[Tensor] = []
        peak_bytes = peak_requested_bytes(lambda: results.append(run()), device_type)
        return max(peak_bytes - results[0].nbytes, 0)
