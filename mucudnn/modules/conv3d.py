"""The drop-in for ``torch.nn.Conv3d``, and its operators: torch's own convolution in micro-batches, to save memory.

Libraries take memory inside a convolution that grows with the batch: the im2col matrix, copies in another format. In
micro-batches they take that of one slice. y and dx are written slice by slice, dw is summed, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from mucudnn.kernels.contract.buffers import suggests_channels_last
from mucudnn.modules.tuned_module import TunedClass, are_tuples, operator_takes
from mucudnn.running.autocast import autocast_computes
from mucudnn.words.problem import Operation
from mucudnn.words.units import format_bytes

UNDIVIDED = 0


@dataclass(frozen=True, slots=True)
class DividedOperation:
    """One operation of an ``nn.Conv3d`` and the slices in which it runs. Bytes are those beside its result.

    x_shape: (N, C, D, H, W), the padding included that torch adds beforehand. micro_batch_size: samples in a slice,
    ``UNDIVIDED`` for torch's own. undivided_bytes: what torch's own takes inside. divided_bytes: the same in slices.
    reason: for people.
    """

    operation: Operation
    x_shape: tuple[int, ...]
    micro_batch_size: int
    undivided_bytes: int
    divided_bytes: int
    reason: str = ""

    def __str__(self) -> str:
        """Text for people: ``forward 8x16x32x64x64: 2 of 8 samples at a time, 12 MiB instead of 48 MiB``."""
        n, *sample = self.x_shape
        what = f"{self.operation} {n}x{'x'.join(map(str, sample))}"
        if self.micro_batch_size == UNDIVIDED:
            return f"{what}: torch's own, undivided, {format_bytes(self.undivided_bytes)}; {self.reason}"
        sizes = f"{format_bytes(self.divided_bytes)} instead of {format_bytes(self.undivided_bytes)}"
        return f"{what}: {self.micro_batch_size} of {n} samples at a time, {sizes}; {self.reason}"


class Conv3d(TunedClass, torch.nn.Conv3d):
    """A ``torch.nn.Conv3d``: same arguments, same state dict, same result.

    For the sizes that it was tuned for it runs torch's convolution in micro-batches, where undivided that needs more
    memory than the limit; for all others as torch does. ``divided`` says what was chosen for it and why. x:
    (N, C, D, H, W) or (C, D, H, W), y: (N, K, O, P, Q) or (K, O, P, Q).

    >>> import torch, mucudnn
    >>> layer = mucudnn.Conv3d(in_channels=3, out_channels=8, kernel_size=3, stride=2, padding=1)
    >>> layer(torch.zeros(4, 3, 8, 32, 48)).shape  # (N, C, D, H, W) -> (N, K, O, P, Q)
    torch.Size([4, 8, 4, 16, 24])
    """

    _untuned_class = torch.nn.Conv3d

    divided: tuple[DividedOperation, ...] = ()

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self._divided_forward(input, weight, bias) if self.divided else None
        return super()._conv_forward(input, weight, bias) if y is None else y

    def _divided_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Compute in micro-batches; ``None``: torch's convolution, which also says what is wrong."""
        if not operator_takes(x, (5, 5)) or not are_tuples(self.stride, self.dilation, length=3):
            return None
        x, padding = padded(self, x)
        sizes = self._micro_batch_sizes(x)
        if not any(sizes) or not are_tuples(padding, length=3):
            return None
        return conv3d(x, weight, bias, self.stride, padding, self.dilation, self.groups, sizes)

    def _micro_batch_sizes(self, x: Tensor) -> list[int]:
        """Return those of y, dx and dw: of any number of samples of the size that was tuned for."""
        of_this_size = {one.operation: one.micro_batch_size for one in self.divided if one.x_shape[1:] == x.shape[1:]}
        return [of_this_size.get(operation, UNDIVIDED) for operation in Operation]


def padded(module: torch.nn.Conv3d, x: Tensor) -> tuple[Tensor, Any]:
    """Pad x where a module's padding is not zeros on both sides alike. Returns what is left for the convolution."""
    both_sides = module._reversed_padding_repeated_twice
    if module.padding_mode != "zeros":
        return F.pad(x, both_sides, module.padding_mode), (0, 0, 0)
    if not isinstance(module.padding, str):
        return x, module.padding
    extra = [right - left for left, right in zip(both_sides[::2], both_sides[1::2], strict=True)]
    if any(extra):  # an even filter: the odd slice belongs behind
        x = F.pad(x, [size for each in extra for size in (0, each)])
    return x, tuple(both_sides[-2::-2])


def _torchs(operation: Operation) -> Callable[..., Tensor]:
    """Give torch's convolution an operator's signature: undivided."""

    def compute(x: Tensor, w: Tensor, third: Tensor | None, *rest: Any) -> Tensor:
        stride, padding, dilation, groups, *_ = rest
        if operation is Operation.FORWARD:
            return torch.conv3d(x, w, third, stride, padding, dilation, groups)
        of_data = operation is Operation.BACKWARD_DATA
        wanted = of_data, not of_data, False
        geometry = stride, padding, dilation, False, (0, 0, 0), groups
        gradients = torch.ops.aten.convolution_backward.default(third, x, w, None, *geometry, wanted)
        gradient: Tensor = gradients[0] if of_data else gradients[1]
        return gradient

    return compute


def _divided(operation: Operation) -> Callable[..., Tensor]:
    """Make what computes an operation in micro-batches of the size that is the operation's among ``sizes``."""
    place, torchs = list(Operation).index(operation), _torchs(operation)

    def compute(x: Tensor, w: Tensor, third: Tensor | None, *rest: Any) -> Tensor:
        *_, groups, sizes = rest
        size = sizes[place]
        if size <= UNDIVIDED or x.dim() != 5 or len(x) <= size or x.shape[1] != w.shape[1] * groups:
            return torchs(x, w, third, *rest)  # which also says what is wrong
        if operation is Operation.BACKWARD_FILTER:
            return _sum(w, (torchs(x[part], w, third[part], *rest) for part in _slices(len(x), size)))  # type: ignore[index]
        y = None
        for part in _slices(len(x), size):
            if operation is Operation.FORWARD:
                result = torchs(x[part], w, third, *rest)
            else:
                result = torchs(x[part], w, third[part], *rest)  # type: ignore[index]
            y = _like(result, len(x)) if y is None else y
            y[part] = result
            del result  # before the next slice
        assert y is not None
        return y

    return compute


def _slices(n: int, size: int) -> Iterator[slice]:
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def _like(result: Tensor, n: int) -> Tensor:
    """Return an empty tensor for ``n`` samples, in the memory format of the first ones."""
    memory_format = torch.channels_last_3d if suggests_channels_last(result) else torch.contiguous_format
    return torch.empty((n, *result.shape[1:]), dtype=result.dtype, device=result.device, memory_format=memory_format)


def _sum(w: Tensor, gradients: Iterator[Tensor]) -> Tensor:
    total = None
    for gradient in gradients:
        if total is None:
            total = gradient.to(torch.float32) if gradient.itemsize < 4 else gradient
        else:
            total += gradient
        del gradient  # before the next slice
    assert total is not None
    return total.to(w.dtype)


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, dy, *ctx.rest = inputs
    ctx.save_for_backward(x, w, dy)


def _save_for_conv3d(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, *ctx.rest = inputs
    ctx.save_for_backward(x, w)  # not the bias, which may be changed in place before the backward pass


def _conv3d_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    of_x, of_w, of_bias = ctx.needs_input_grad[:3]
    dx = conv3d_backward_data(x, w, dy, *ctx.rest) if of_x else None
    dw = conv3d_backward_filter(x, w, dy, *ctx.rest) if of_w else None
    return dx, dw, dy.sum((0, 2, 3, 4)) if of_bias else None, *(None for _ in ctx.rest)


def _backward_data_gradients(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    """Differentiate dx by w and dy. g: the gradient of dx. x has none: it lends its shape."""
    _, w, dy = ctx.saved_tensors
    _, of_w, of_dy = ctx.needs_input_grad[:3]
    dw = conv3d_backward_filter(g, w, dy, *ctx.rest) if of_w else None
    return None, dw, conv3d(g, w, None, *ctx.rest) if of_dy else None, *(None for _ in ctx.rest)


def _backward_filter_gradients(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    """Differentiate dw by x and dy. g: the gradient of dw. w has none: it lends its shape."""
    x, _, dy = ctx.saved_tensors
    of_x, _, of_dy = ctx.needs_input_grad[:3]
    dx = conv3d_backward_data(x, g, dy, *ctx.rest) if of_x else None
    return dx, None, conv3d(x, g, None, *ctx.rest) if of_dy else None, *(None for _ in ctx.rest)


def _flops(operation: Operation) -> Callable[..., int]:
    """Take torch's own formula for an operation."""

    def flops(x: Tensor, w: Tensor, third: Tensor | None, *rest: Any, out_val: Tensor) -> int:
        stride, padding, dilation, groups, _ = rest
        geometry = stride, padding, dilation, False, (0, 0, 0), groups
        counted: int
        if operation is Operation.FORWARD:
            counted = flop_registry[torch.ops.aten.convolution](x, w, third, *geometry, out_val=out_val)
        else:
            of_data = operation is Operation.BACKWARD_DATA
            arguments = third, x, w, None, *geometry, (of_data, not of_data, False)
            formula = flop_registry[torch.ops.aten.convolution_backward]
            counted = formula(*arguments, out_val=(out_val, out_val, None))
        return counted

    return flops


def _define(operation: Operation, name: str, gradients: Callable[..., Any]) -> OpOverload[..., Tensor]:
    forward, qualified = operation is Operation.FORWARD, f"mucudnn::{name}"
    operands = "Tensor x, Tensor w, Tensor? bias" if forward else "Tensor x, Tensor w, Tensor dy"
    rest = "SymInt[3] stride, SymInt[3] padding, SymInt[3] dilation, SymInt groups, int[3] micro_batch_sizes"
    _library.define(f"{name}({operands}, {rest}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _divided(operation), "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, _torchs(operation), lib=_library)
    save = _save_for_conv3d if forward else _save_all
    torch.library.register_autograd(qualified, gradients, setup_context=save, lib=_library)
    operator = getattr(torch.ops.mucudnn, name)
    register_flop_formula(operator, get_raw=True)(_flops(operation))
    overload: OpOverload[..., Tensor] = operator.default
    return overload


_library: Any = torch.library.Library("mucudnn", "FRAGMENT")  # type: ignore[no-untyped-call]
conv3d = _define(Operation.FORWARD, "conv3d", _conv3d_gradients)
conv3d_backward_data = _define(Operation.BACKWARD_DATA, "conv3d_backward_data", _backward_data_gradients)
conv3d_backward_filter = _define(Operation.BACKWARD_FILTER, "conv3d_backward_filter", _backward_filter_gradients)
autocast_computes(_library, "conv3d", conv3d)
