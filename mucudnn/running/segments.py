"""Segments of a model that run in micro-batches, forward and backward.

A segment is a module, or consecutive children of a sequential one, in which no operation mixes samples. It keeps its
inputs and its result. The forward pass computes the result micro-batch by micro-batch, without what gradients need;
the backward pass computes each micro-batch again, with its gradients, before the next. So only one micro-batch of what
is inside is in memory at a time: Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016, on a part of the
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mucudnn.core.errors import InvalidInputError
from mucudnn.running import tape
from mucudnn.running.modules import TunedModule, derived_tuned, require_free_names


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a model.

    module: its name; "" is the model itself.
    first, last: of the children of a sequential module, inclusive; None for a whole module.
    micro_batch: samples that are computed together.
    """

    module: str
    first: int | None
    last: int | None
    micro_batch: int

    def __str__(self) -> str:
        children = "" if self.first is None else f"[{self.first}:{(self.last or 0) + 1}]"
        return f"{self.module or 'the model'}{children} in micro-batches of {self.micro_batch}"


class SegmentedModule(TunedModule, nn.Module):
    """A module that runs segments in micro-batches while a forward pass is recorded for a budget.

    segments: those of this module, in the order of its children.
    """

    segments: tuple[Segment, ...] = ()

    def forward(self, *arguments: Any, **named: Any) -> Any:
        whole = super().forward
        if not self.segments or tape.recording() is None:
            return whole(*arguments, **named)
        if self.segments[0].first is None:
            parameters = list(self.parameters())
            return in_micro_batches(partial(whole, **named), parameters, self.segments[0].micro_batch, arguments)
        assert isinstance(self, nn.Sequential)
        (x,) = arguments
        children, segments, index = list(self), {segment.first: segment for segment in self.segments}, 0
        while index < len(children):
            segment = segments.get(index)
            if segment is None:
                x = children[index](x)
                index += 1
            else:
                assert segment.last is not None
                inside = nn.Sequential(*children[index : segment.last + 1])
                x = in_micro_batches(inside, list(inside.parameters()), segment.micro_batch, (x,))
                index = segment.last + 1
        return x


def set_segments(model: nn.Module, segments: Sequence[Segment]) -> None:
    """Make these the segments of a model, and no others.

    Raises ``InvalidInputError`` if the class of a module cannot be changed.
    """
    for module in model.modules():
        if isinstance(module, SegmentedModule):
            vars(module)["segments"] = ()
    for segment in sorted(segments, key=lambda segment: segment.first or 0):
        module = model.get_submodule(segment.module)
        if not isinstance(module, SegmentedModule):
            if isinstance(module, TunedModule):
                raise InvalidInputError(f"{segment.module} is a single layer, which chooses its own micro-batches")
            require_free_names(module)
            object.__setattr__(module, "__class__", derived_tuned(SegmentedModule, type(module)))
        vars(module)["segments"] = *vars(module).get("segments", ()), segment


def in_micro_batches(
    function: Callable[..., Any], parameters: Sequence[Tensor], micro_batch: int, inputs: Sequence[Any]
) -> Any:
    """Return function(*inputs), of tensors (N, ...), computed for so many samples at a time, forward and backward.

    Other inputs, and those of fewer samples, are computed at once.

    parameters: those that the function reads.
    """
    are_alike = all(isinstance(x, Tensor) and x.dim() > 0 and len(x) == len(inputs[0]) for x in inputs)
    if not inputs or not are_alike or len(inputs[0]) <= micro_batch:
        return function(*inputs)
    slices = _Slices(function, micro_batch, len(inputs), _autocast(inputs[0].device.type))
    recording = tape.recording()
    with nullcontext() if recording is None else recording.paused():
        y: Tensor = _InMicroBatches.apply(slices, *inputs, *parameters)  # type: ignore[no-untyped-call]
    tape.note(y, "segment", _values, slices, *inputs, *parameters)
    return y


@dataclass(frozen=True, slots=True)
class _Slices:
    """How a segment is computed.

    inputs: how many of its operands are inputs; the others are parameters.
    autocast: makes a context with the settings of the forward pass.
    """

    function: Callable[..., Any]
    micro_batch: int
    inputs: int
    autocast: Callable[[], Any]

    def of(self, operands: Sequence[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield the samples of each micro-batch, and the inputs."""
        for start in range(0, len(operands[0]), self.micro_batch):
            samples = slice(start, start + self.micro_batch)
            yield samples, [x[samples] for x in operands[: self.inputs]]


def _autocast(device_type: str) -> Callable[[], Any]:
    """Return what makes a context with the present settings of autocast."""
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,  # whose entries would have graphs of an earlier micro-batch
    )


def _values(slices: _Slices, *operands: Tensor) -> Tensor:
    """Return the result of a segment, without what gradients need."""
    y = None
    with torch.no_grad(), slices.autocast():
        for samples, inputs in slices.of(operands):
            part = slices.function(*inputs)
            if y is None:
                y = _empty_like(part, len(operands[0]))
            y[samples] = part
            del part
    assert y is not None
    return y


def _empty_like(part: Tensor, n: int) -> Tensor:
    """Return memory for n samples, of the shape and in the format of those given."""
    is_last = part.dim() in (4, 5) and not part.is_contiguous()
    memory_format = torch.channels_last if part.dim() == 4 else torch.channels_last_3d
    return torch.empty(
        (n, *part.shape[1:]),
        dtype=part.dtype,
        device=part.device,
        memory_format=memory_format if is_last else torch.contiguous_format,
    )


class _InMicroBatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slices: _Slices, *operands: Tensor) -> Tensor:
        ctx.slices = slices
        ctx.save_for_backward(*operands)
        return _values(slices, *operands)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        slices, operands, needed = ctx.slices, ctx.saved_tensors, ctx.needs_input_grad[1:]
        gradients: list[Tensor | None] = [None] * len(operands)
        of_inputs = [number for number in range(slices.inputs) if needed[number]]
        of_parameters = [number for number in range(slices.inputs, len(operands)) if needed[number]]
        for samples, inputs in slices.of(operands):
            with torch.enable_grad(), slices.autocast():
                inputs = [x.detach().requires_grad_(needed[number]) for number, x in enumerate(inputs)]
                y = slices.function(*inputs)
            wanted = [*(inputs[number] for number in of_inputs), *(operands[number] for number in of_parameters)]
            found = torch.autograd.grad(y, wanted, dy[samples], allow_unused=True)
            del y
            for number, part in zip((*of_inputs, *of_parameters), found, strict=True):
                whole = gradients[number]
                if part is None:
                    continue
                if number < slices.inputs:
                    if whole is None:
                        whole = gradients[number] = torch.empty_like(operands[number])
                    whole[samples] = part
                else:  # a copy, since it may be dy itself, or the gradient of two parameters
                    gradients[number] = part.clone() if whole is None else whole.add_(part)
            del found, part
        return None, *gradients
