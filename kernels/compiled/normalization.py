"""Normalization in training, with an addition and an activation behind it, by C++ functions for the CPU.

The statistics, the output and the gradients take one call each. Tensors are (N, C, ...), dense, contiguous or with the
channels last. All arithmetic is in float32, sums in double, and half precision is rounded where results are written.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from mucudnn.core.errors import InvalidInputError
from mucudnn.kernels.compiled.library import (
    FUNCTIONS,
    NORM_OPERANDS,
    NormArgument,
    function,
    loaded_build,
)
from mucudnn.kernels.pages import on_huge_pages

PIXELS = -1
VERSION = 2  # of the functions: with another one, stored times do not count
_NULLS = (0,) * len(NORM_OPERANDS.unpack(bytes(NORM_OPERANDS.size)))
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FUNCTIONS = (None, "ReLU", "ReLU6", "SiLU", "hardswish", "leaky_relu", "gelu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalization and the activation behind it.

    sets: statistics of each sample: 0 for one of each channel over all samples (batch norm), G of G groups of channels
        (group norm; instance norm has G = C), ``PIXELS`` of each pixel over its channels (layer norm over channels).
    eps: added to variances.
    function: the activation, a name in ``FUNCTIONS``, or None.
    slope: of leaky_relu.
    """

    sets: int
    eps: float
    function: str | None = None
    slope: float = 0.01


def why_not(x: Tensor, norm: Norm) -> str | None:
    """Return why the C++ functions do not compute a normalization of x, or None."""
    if x.device.type != "cpu":
        return f"x is on {x.device.type}; the compiled functions are for the CPU"
    return loaded_build().why_not_compiled or _why_not(x, norm)


def _why_not(x: Tensor, norm: Norm) -> str | None:
    if norm.function not in _FUNCTIONS:
        return f"the function is {norm.function}; compiled are {', '.join(map(str, _FUNCTIONS[1:]))}"
    if x.dtype not in _ELEMENTS:
        return f"x is {x.dtype}; the functions are compiled for {', '.join(map(str, _ELEMENTS))}"
    if x.dim() < 2 or x.numel() == 0:
        return f"x is {tuple(x.shape)}; it must be (N, C, ...), and not empty"
    if norm.sets > 0 and x.shape[1] % norm.sets:
        return f"{x.shape[1]} channels are not {norm.sets} equal groups"
    is_last = _is_channels_last(x)
    if is_last is None:
        return f"x of {tuple(x.shape)} has the strides {x.stride()}; it must be contiguous or have the channels last"
    if norm.sets == PIXELS and not is_last:
        return "x is contiguous; pixels are normalized with the channels last"
    return None


def moments(x: Tensor, norm: Norm, running: tuple[Tensor, Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
    """Return the means and 1 / sqrt(variance + eps) of the sets, in float32: (C,), (N * G,) or (N * pixels,).

    running: running means and variances (C,), which are updated in place with the unbiased variance, and the momentum.
    """
    running_mean, running_var, momentum = running or (None, None, 0.0)
    argument, statistics, _ = _prepared(x, norm, (None, None), (running_mean, running_var))
    mean = torch.empty(statistics, dtype=torch.float32)
    inverse = torch.empty(statistics, dtype=torch.float32)
    function("norm_moments")(argument, _operands(x, mean, inverse, running_mean, running_var), momentum)
    return mean, inverse


def forward(
    x: Tensor,
    norm: Norm,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    added: Tensor | None = None,
    *,
    keeps_mask: bool = False,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return y = function((x - mean) * inverse * weight + bias + added), and a mask for ``backward``, or None.

    mean, inverse: of ``moments``, or constants.
    weight, bias: (C,), of x's dtype or float32.
    keeps_mask: whether to return a bit for each element, whether the activation passes it: of ReLU, ReLU6, leaky_relu.
    y: like x, to be written; None to allocate the result.
    """
    argument, _, mask_bytes = _prepared(x, norm, (weight, bias))
    y = on_huge_pages(torch.empty_like(x)) if y is None else y
    mask = torch.empty(mask_bytes, dtype=torch.uint8) if keeps_mask else None
    _require_like(x, added)
    operands = _operands(x, mean, inverse, None, None, weight, bias, added, mask, y)
    function("norm_forward")(argument, operands)
    return y, mask


def backward(
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Tensor | None = None,
    *,
    is_fixed: bool = False,
    needs_dx: bool = True,
    needs_dadded: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dadded, dweight and dbias, each None if it is not needed or there is no such operand.

    mask: of ``forward``, which it must be if there was an addition and there is a function.
    is_fixed: whether mean and inverse are constants.
    """
    _require_like(x, dy)
    argument, _, _ = _prepared(x, norm, (weight, bias), is_fixed=is_fixed)
    dx = on_huge_pages(torch.empty_like(x)) if needs_dx else None
    is_dy = norm.function is None
    dadded = on_huge_pages(torch.empty_like(x)) if needs_dadded and not is_dy else None
    dweight = None if weight is None else torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    operands = _operands(
        x, mean, inverse, None, None, weight, bias, None, mask, None, dy, dx, dadded, dweight, dbias
    )  # fmt: skip
    function("norm_backward")(argument, operands)
    return dx, dy if needs_dadded and is_dy else dadded, dweight, dbias


@dataclass(frozen=True, slots=True)
class Entries:
    """What the C++ functions are called with, by their addresses, for operands of one kind.

    argument: the C struct, which must be kept while address is used.
    functions: the addresses of moments, forward and backward.
    statistics, mask_bytes: how many means there are, and the bytes of a mask.
    """

    argument: NormArgument
    address: int
    functions: tuple[int, int, int]
    statistics: int
    mask_bytes: int


def entries(x: Tensor, norm: Norm, weight: Tensor | None, running: Tensor | None, *, is_fixed: bool) -> Entries:
    """Return how to call the C++ functions for operands like these; their values are not used.

    weight: or the bias, or None if there is neither.
    running: one of the running statistics, or None.
    """
    argument, statistics, mask_bytes = _prepared(x, norm, (weight, None), (running, None), is_fixed=is_fixed)
    functions = (function(f"norm_{name}") for name in ("moments", "forward", "backward"))
    moments, forward, backward = (ctypes.cast(cast(Any, entry), ctypes.c_void_p).value or 0 for entry in functions)
    return Entries(argument, ctypes.addressof(argument), (moments, forward, backward), statistics, mask_bytes)


def _prepared(
    x: Tensor,
    norm: Norm,
    parameters: tuple[Tensor | None, Tensor | None],
    running: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    is_fixed: bool = False,
) -> tuple[NormArgument, int, int]:
    types = _common_type(*parameters), _common_type(*running)
    return _kept(x.shape, x.stride(), x.dtype, norm, *types, is_fixed=is_fixed, threads=torch.get_num_threads())


def _common_type(first: Tensor | None, second: Tensor | None) -> torch.dtype | None:
    """Return the dtype of two parameters, or of the only one. Raises ``InvalidInputError`` if they differ."""
    if first is None or second is None:
        return second.dtype if second is not None else None if first is None else first.dtype
    if first.dtype is not second.dtype:
        raise InvalidInputError(f"a parameter is {first.dtype}, another one {second.dtype}; they must have one dtype")
    return first.dtype


@lru_cache(maxsize=4096)
def _kept(
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    norm: Norm,
    parameters: torch.dtype | None,
    running: torch.dtype | None,
    *,
    is_fixed: bool,
    threads: int,
) -> tuple[NormArgument, int, int]:
    """Return the argument of the C++ functions, how many means there are, and the bytes of a mask."""
    x = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    if (reason := _why_not(x, norm)) is not None:
        raise InvalidInputError(reason)
    for parameter in (parameters, running):
        if parameter not in (None, torch.float32, dtype):
            raise InvalidInputError(f"a parameter is {parameter}; it must be float32 or as x, {dtype}")
    n, c, pixels = shape[0], shape[1], prod(shape[2:])
    argument = NormArgument(
        element=_ELEMENTS[dtype],
        parameter_element=_ELEMENTS[parameters or torch.float32],
        running_element=_ELEMENTS[running or torch.float32],
        n=n,
        c=c,
        pixels=pixels,
        channels_last=bool(_is_channels_last(x)),
        sets=norm.sets,
        function=FUNCTIONS.index(norm.function),
        is_fixed=is_fixed,
        threads=threads,
        eps=norm.eps,
        slope=norm.slope,
    )
    statistics = c if norm.sets == 0 else n * (pixels if norm.sets == PIXELS else norm.sets)
    return argument, statistics, function("norm_mask_bytes")(argument)


def _is_channels_last(x: Tensor) -> bool | None:
    """Return whether the channels are last in memory, or first (contiguous); None if x is not dense in either order."""
    if x.permute(0, *range(2, x.dim()), 1).is_contiguous():
        return True
    return False if x.is_contiguous() else None


def _require_like(x: Tensor, other: Tensor | None) -> None:
    if other is None or (other.shape, other.stride(), other.dtype) == (x.shape, x.stride(), x.dtype):
        return
    is_same = other.shape == x.shape and other.dtype is x.dtype and other.device == x.device
    if not is_same or _is_channels_last(other) != _is_channels_last(x):
        raise InvalidInputError(
            f"a tensor of {tuple(other.shape)}, {other.dtype}, has the strides {other.stride()}; those of x are "
            f"{tuple(x.shape)}, {x.dtype} and {x.stride()}"
        )


def _operands(*tensors: Tensor | None) -> bytes:
    """Return the C struct of the tensors, in its order."""
    fields: list[int] = []
    for tensor in tensors:
        fields += (0, 0) if tensor is None else (tensor.data_ptr(), tensor.nbytes)
    return NORM_OPERANDS.pack(*fields, *_NULLS[len(fields) :])
