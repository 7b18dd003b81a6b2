"""Segments of a model that run in micro-batches, forward and backward.

A segment is a module, or consecutive children of a sequential one, in which no operation mixes samples. It keeps its
inputs and its result. The forward pass computes the result micro-batch by micro-batch, without what gradients need;
the backward pass computes each micro-batch again, with its gradients, before the next. So only one micro-batch of what
is inside is in memory at a time: Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016, on a part of the
batch.

Where rows of the result depend on few rows of the inputs, a micro-batch may be a band of rows of one sample, or of
frames of a volume. Its inputs have a halo. Rows at the ends of what they give, which padding has reached, are left out,
and have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mucudnn.core.errors import InvalidInputError
from mucudnn.running import tape
from mucudnn.running.modules import TunedModule, derived_tuned, require_free_names


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of a result (N, C, rows, ...), and those of the inputs from which they are computed.

    start, stop: of the result.
    offset: the number of rows before ``start`` in what is computed from the inputs' rows.
    of_inputs: start and stop, for each input.
    """

    start: int
    stop: int
    offset: int
    of_inputs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a model.

    module: its name; "" is the model itself.
    first, last: of the children of a sequential module, inclusive; None for a whole module.
    micro_batch: samples that are computed together.
    bands: in which each micro-batch is computed if the inputs have as many rows as these; none for whole samples.
    """

    module: str
    first: int | None
    last: int | None
    micro_batch: int
    bands: tuple[Band, ...] = ()

    def __str__(self) -> str:
        children = "" if self.first is None else f"[{self.first}:{(self.last or 0) + 1}]"
        bands = f", each in {len(self.bands)} bands of rows" if self.bands else ""
        return f"{self.module or 'the model'}{children} in micro-batches of {self.micro_batch}{bands}"

    @classmethod
    def of(cls, *, bands: Sequence[Mapping[str, Any]], **fields: Any) -> Segment:
        """Return a segment from what ``dataclasses.asdict`` has made of one, also if JSON has made its tuples lists."""
        made = (Band(**{**band, "of_inputs": tuple(map(tuple, band["of_inputs"]))}) for band in bands)
        return cls(**fields, bands=tuple(made))

    def pieces(self, inputs: Sequence[Tensor]) -> Iterator[Piece]:
        """Yield what is computed together."""
        bands = self.bands
        if bands and [x.shape[2:3] for x in inputs] != [(stop,) for _, stop in bands[-1].of_inputs]:
            bands = ()
        for start in range(0, len(inputs[0]), self.micro_batch):
            samples = slice(start, start + self.micro_batch)
            for band in bands:
                of_inputs: list[tuple[slice, ...]] = [(samples, _ALL, slice(*rows)) for rows in band.of_inputs]
                own = slice(band.offset, band.offset + band.stop - band.start)
                yield Piece((samples, _ALL, slice(band.start, band.stop)), (_ALL, _ALL, own), of_inputs)
            if not bands:
                yield Piece((samples,), (), [(samples,)] * len(inputs))


class Piece(NamedTuple):
    """What is computed together: its indices in the result, in what is computed, and in each input."""

    of_result: tuple[slice, ...]
    of_own: tuple[slice, ...]
    of_inputs: list[tuple[slice, ...]]


_ALL = slice(None)


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
            return in_micro_batches(partial(whole, **named), parameters, self.segments[0], arguments)
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
                x = in_micro_batches(inside, list(inside.parameters()), segment, (x,))
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
    function: Callable[..., Any], parameters: Sequence[Tensor], segment: Segment, inputs: Sequence[Any]
) -> Any:
    """Return function(*inputs), of tensors (N, ...), computed piece by piece, forward and backward.

    Other inputs, and those of a single piece, are computed at once.

    parameters: those that the function reads.
    segment: says what the pieces are.
    """
    are_alike = all(isinstance(x, Tensor) and x.dim() > 0 and len(x) == len(inputs[0]) for x in inputs)
    if not inputs or not are_alike or len(list(segment.pieces(inputs))) <= 1:
        return function(*inputs)
    pieces = _Pieces(function, segment, len(inputs), _autocast(inputs[0].device.type))
    recording = tape.recording()
    with nullcontext() if recording is None else recording.paused():
        y: Tensor = _InMicroBatches.apply(pieces, *inputs, *parameters)  # type: ignore[no-untyped-call]
    tape.note(y, "segment", _values, pieces, *inputs, *parameters)
    return y


@dataclass(frozen=True, slots=True)
class _Pieces:
    """How a segment is computed.

    inputs: how many of its operands are inputs; the others are parameters.
    autocast: makes a context with the settings of the forward pass.
    """

    function: Callable[..., Any]
    segment: Segment
    inputs: int
    autocast: Callable[[], Any]

    def of(self, operands: Sequence[Tensor]) -> Iterator[tuple[Piece, list[Tensor]]]:
        """Yield each piece with its inputs."""
        inputs = operands[: self.inputs]
        for piece in self.segment.pieces(inputs):
            yield piece, [x[index] for x, index in zip(inputs, piece.of_inputs, strict=True)]


def _autocast(device_type: str) -> Callable[[], Any]:
    """Return what makes a context with the present settings of autocast."""
    return partial(
        torch.autocast,
        device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
        cache_enabled=False,  # whose entries would have graphs of an earlier micro-batch
    )


def _values(pieces: _Pieces, *operands: Tensor) -> Tensor:
    """Return the result of a segment, without what gradients need."""
    y, n, bands = None, len(operands[0]), pieces.segment.bands
    with torch.no_grad(), pieces.autocast():
        for piece, inputs in pieces.of(operands):
            part = pieces.function(*inputs)
            if y is None:
                shape = [n, *part.shape[1:]]
                if piece.of_own:
                    shape[2] = bands[-1].stop
                y = _empty_like(part, shape)
            y[piece.of_result] = part[piece.of_own]
            del part
    assert y is not None
    return y


def _empty_like(part: Tensor, shape: Sequence[int]) -> Tensor:
    """Return memory for a result of which a part is given, in the same format."""
    is_last = part.dim() in (4, 5) and not part.is_contiguous()
    memory_format = torch.channels_last if part.dim() == 4 else torch.channels_last_3d
    return torch.empty(
        tuple(shape),
        dtype=part.dtype,
        device=part.device,
        memory_format=memory_format if is_last else torch.contiguous_format,
    )


class _InMicroBatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: _Pieces, *operands: Tensor) -> Tensor:
        ctx.pieces = pieces
        ctx.save_for_backward(*operands)
        return _values(pieces, *operands)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        pieces, operands, needed = ctx.pieces, ctx.saved_tensors, ctx.needs_input_grad[1:]
        gradients: list[Tensor | None] = [None] * len(operands)
        of_inputs = [number for number in range(pieces.inputs) if needed[number]]
        of_parameters = [number for number in range(pieces.inputs, len(operands)) if needed[number]]
        for piece, inputs in pieces.of(operands):
            with torch.enable_grad(), pieces.autocast():
                inputs = [x.detach().requires_grad_(needed[number]) for number, x in enumerate(inputs)]
                y = pieces.function(*inputs)[piece.of_own]
            wanted = [*(inputs[number] for number in of_inputs), *(operands[number] for number in of_parameters)]
            found = torch.autograd.grad(y, wanted, dy[piece.of_result], allow_unused=True)
            del y
            for number, part in zip((*of_inputs, *of_parameters), found, strict=True):
                whole = gradients[number]
                if part is None:
                    continue
                if number >= pieces.inputs:  # a copy, since it may be dy itself, or the gradient of two parameters
                    gradients[number] = part.clone() if whole is None else whole.add_(part)
                elif piece.of_own:  # bands overlap
                    if whole is None:
                        whole = gradients[number] = torch.zeros_like(operands[number])
                    whole[piece.of_inputs[number]].add_(part)
                else:
                    if whole is None:
                        whole = gradients[number] = torch.empty_like(operands[number])
                    whole[piece.of_inputs[number]] = part
            del found, part
        return None, *gradients
