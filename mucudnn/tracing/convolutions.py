"""Finds the convolutions that a model computes, by running it once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format

from mucudnn.running.devices import largest_batch_size
from mucudnn.words.errors import InvalidInputError
from mucudnn.words.problem import ConvProblem, MemoryFormat, Operation


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one ``nn.Conv2d``: the module's name, the forward problem, and how many samples it was called with.

    input_needs_gradient: whether autograd would compute dx.
    """

    name: str
    problem: ConvProblem
    batch_size: int
    input_needs_gradient: bool


def convolutions_of(model: nn.Module, sample_input: Any) -> list[tuple[str, ConvProblem, int]]:
    """List module name, forward problem and batch size of every call; see ``trace``."""
    return [(call.name, call.problem, call.batch_size) for call in trace(model, sample_input)]


def trace(model: nn.Module, sample_input: Any) -> list[Call]:
    """List every call of an ``nn.Conv2d`` in ``model(sample_input)``, in order, as torch computes it.

    sample_input: the only argument, or a tuple of all positional ones. Padding that torch does in a step of its own
    (``padding_mode`` other than zeros, the odd half of ``padding="same"``) is part of H and W. Calls that no
    ``ConvProblem`` describes are left out: empty batches, too large ones, and dtypes that it does not have.

    The forward pass is a real one, in the model's mode: running statistics and random numbers advance. Raises whatever
    the model raises.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU())
    >>> [(call.name, call.batch_size, str(call.problem)) for call in trace(model, torch.zeros(4, 3, 32, 32))]
    [('0', 4, 'forward 3x32x32 -> 8, 3x3, padding 1x1, float32 contiguous')]
    """
    calls: list[Call] = []
    arguments = sample_input if isinstance(sample_input, tuple) else (sample_input,)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d):
                handle = module.register_forward_pre_hook(_recorder(name, calls), with_kwargs=True)
                hooks.callback(handle.remove)
        model(*arguments)
    return calls


def call_of(name: str, module: nn.Conv2d, arguments: tuple[Any, ...], named: dict[str, Any]) -> Call | None:
    """Describe the call ``module(*arguments, **named)``; ``None`` where no ``ConvProblem`` does."""
    x = arguments[0] if arguments else named["input"]
    x = x if x.dim() == 4 else x.unsqueeze(0)
    problem = _problem(module, x)
    if problem is None or not 0 < len(x) <= largest_batch_size(problem, x.device.type):
        return None
    return Call(name, problem, len(x), x.requires_grad)


def _recorder(name: str, calls: list[Call]) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def record(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert isinstance(module, nn.Conv2d)
        call = call_of(name, module, arguments, named)
        if call is not None:
            calls.append(call)

    return record


def _problem(module: nn.Conv2d, x: Tensor) -> ConvProblem | None:
    (extra_h, extra_w), padding = _padding(module)
    r, s = module.weight.shape[2:]
    dtype, memory_format = _dtype(x), _memory_format(x, module.weight)
    try:
        return ConvProblem(
            Operation.FORWARD,
            c=x.shape[1],
            h=x.shape[2] + extra_h,
            w=x.shape[3] + extra_w,
            k=module.out_channels,
            r=r,
            s=s,
            stride=_pair(module.stride),
            padding=padding,
            dilation=_pair(module.dilation),
            groups=module.groups,
            dtype=dtype,
            memory_format=memory_format,
        )
    except InvalidInputError:
        return None  # torch will say what is wrong with it, or can do what mucudnn cannot


def _padding(module: nn.Conv2d) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (rows, columns) that torch adds to x beforehand, and the padding of the convolution itself."""
    left, right, top, bottom = module._reversed_padding_repeated_twice
    if module.padding_mode != "zeros":
        return (top + bottom, left + right), (0, 0)
    return (bottom - top, right - left), (top, left)


def _memory_format(x: Tensor, w: Tensor) -> MemoryFormat:
    """Tell the memory format as torch does, by the strides alone where x or w is in both.

    On a GPU there is no float64 in channels_last.
    """
    formats = {suggest_memory_format(tensor) for tensor in (x, w)}
    exact_on_cuda = x.device.type == "cuda" and x.dtype == torch.float64
    channels_last = torch.channels_last in formats and not exact_on_cuda
    return MemoryFormat.CHANNELS_LAST if channels_last else MemoryFormat.CONTIGUOUS


def _dtype(x: Tensor) -> str:
    """Name the dtype in which the convolution computes: autocast leaves float64 alone."""
    kind = x.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return str(torch.get_autocast_dtype(kind) if autocast else x.dtype).removeprefix("torch.")


def _pair(values: tuple[int, ...]) -> tuple[int, int]:
    height, width = values
    return height, width
